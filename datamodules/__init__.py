"""Data modules and the modifiers that change their training sets."""

from typing import TYPE_CHECKING

from lightning_methods._lazy import attach

if TYPE_CHECKING:
    from .base import ArrayDataset as ArrayDataset
    from .base import BaseDataModule as BaseDataModule
    from .continual import ContinualDataModule as ContinualDataModule
    from .graph import BAShapesDataModule as BAShapesDataModule
    from .graph import NodeGraphDataModule as NodeGraphDataModule
    from .graph import TreeCyclesDataModule as TreeCyclesDataModule
    from .graph import TreeGridDataModule as TreeGridDataModule
    from .dynamics import MoonWindows as MoonWindows
    from .dynamics import ThreeMoonsDataModule as ThreeMoonsDataModule
    from .icl import DFASequences as DFASequences
    from .icl import InContextDFADataModule as InContextDFADataModule
    from .llm_eval import CorrectnessMatrixDataModule as CorrectnessMatrixDataModule
    from .llm_eval import MGSMDataModule as MGSMDataModule
    from .llm_eval import XAlpacaEvalDataModule as XAlpacaEvalDataModule
    from .long_tail import ClassBalancedSampler as ClassBalancedSampler
    from .long_tail import PowerSampler as PowerSampler
    from .long_tail import ProgressivelyBalancedSampler as ProgressivelyBalancedSampler
    from .long_tail import SquareRootSampler as SquareRootSampler
    from .long_tail import class_counts as class_counts
    from .long_tail import imbalanced_class_counts as imbalanced_class_counts
    from .long_tail import long_tail_indices as long_tail_indices
    from .modifiers import Classes as Classes
    from .modifiers import LabelNoise as LabelNoise
    from .modifiers import LongTail as LongTail
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
    from .neural import PopulationEmbeddingDataModule as PopulationEmbeddingDataModule
    from .neural import SyntheticPopulationDataModule as SyntheticPopulationDataModule
    from .tabular import SklearnTabularDataModule as SklearnTabularDataModule
    from .tabular import TabularCSVDataModule as TabularCSVDataModule
    from .tabular import TabularDataModule as TabularDataModule
    from .tabular import TabularPreprocessor as TabularPreprocessor
    from .tabular import TalentDataModule as TalentDataModule
    from .text import MaskedBlocks as MaskedBlocks
    from .text import MaskedLMDataModule as MaskedLMDataModule
    from .text import PreferenceDataModule as PreferenceDataModule
    from .text import PreferencePairs as PreferencePairs
    from .text import mask_tokens as mask_tokens
    from .toy import SensitiveToyDataModule as SensitiveToyDataModule
    from .toy import ToyDependenceDataModule as ToyDependenceDataModule
    from .transforms import ZCA as ZCA
    from .transforms import Chain as Chain
    from .transforms import Clip as Clip
    from .transforms import Flatten as Flatten
    from .transforms import RandomAffineNoise as RandomAffineNoise
    from .transforms import RandomColor as RandomColor
    from .transforms import RandomCropFlip as RandomCropFlip
    from .transforms import RandomResizedCrop as RandomResizedCrop
    from .transforms import Resize as Resize
    from .transforms import ScaleToNorm as ScaleToNorm
    from .transforms import Standardize as Standardize
    from .transforms import StrongAugment as StrongAugment
    from .views import Cutout as Cutout
    from .views import MultiViewDataModule as MultiViewDataModule
    from .views import RandomFactorResizedCrop as RandomFactorResizedCrop
    from .views import TwoViewDataModule as TwoViewDataModule
    from .views import build_transform as build_transform
    from .views import render_shapes as render_shapes
    from .vision import CIFARDataModule as CIFARDataModule
    from .vision import DigitsDataModule as DigitsDataModule
    from .vision import DigitsLTDataModule as DigitsLTDataModule
    from .vision import DistilledDataModule as DistilledDataModule
    from .vision import ImageDataModule as ImageDataModule
    from .vision import ImageFolderDataModule as ImageFolderDataModule
    from .vision import ImageNetDataModule as ImageNetDataModule
    from .vision import ImageTableDataModule as ImageTableDataModule
    from .vision import SpuriousDigitsDataModule as SpuriousDigitsDataModule
    from .vision import SyntheticShapesDataModule as SyntheticShapesDataModule
    from .vision import TinyImageNetDataModule as TinyImageNetDataModule
    from .vision import TorchvisionDataModule as TorchvisionDataModule
    from .vision import WaterbirdsDataModule as WaterbirdsDataModule

__getattr__, __dir__, __all__ = attach(__name__, __file__)
