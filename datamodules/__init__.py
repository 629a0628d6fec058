"""Data modules and the modifiers that change their training sets."""

from typing import TYPE_CHECKING

from lightning_methods._lazy import attach

if TYPE_CHECKING:
    from .base import ArrayDataset as ArrayDataset
    from .base import BaseDataModule as BaseDataModule
    from .continual import ContinualDataModule as ContinualDataModule
    from .modifiers import Classes as Classes
    from .modifiers import LabelNoise as LabelNoise
    from .modifiers import PermutedPixels as PermutedPixels
    from .modifiers import PixelNoise as PixelNoise
    from .modifiers import RandomLabels as RandomLabels
    from .modifiers import SoftLabels as SoftLabels
    from .modifiers import SpuriousBackground as SpuriousBackground
    from .modifiers import SpuriousPatch as SpuriousPatch
    from .modifiers import Subset as Subset
    from .modifiers import TwoViews as TwoViews
    from .modifiers import Views as Views
    from .modifiers import WithIndex as WithIndex
    from .tabular import SklearnTabularDataModule as SklearnTabularDataModule
    from .tabular import TabularCSVDataModule as TabularCSVDataModule
    from .tabular import TabularDataModule as TabularDataModule
    from .tabular import TabularPreprocessor as TabularPreprocessor
    from .tabular import TalentDataModule as TalentDataModule
    from .vision import DigitsDataModule as DigitsDataModule
    from .vision import SpuriousDigitsDataModule as SpuriousDigitsDataModule

__getattr__, __dir__, __all__ = attach(__name__, __file__)
