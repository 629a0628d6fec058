"""Lightning Methods: machine-learning papers as PyTorch Lightning modules, whole and right.

Importing the package imports nothing heavy: ``from lightning_methods.gift import gift_loss`` needs torch alone.
"""

__version__ = "0.1.0"
