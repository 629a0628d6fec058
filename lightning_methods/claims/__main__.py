"""``python -m lightning_methods.claims SLUG``."""

import sys

from .app import main

if __name__ == "__main__":
    sys.exit(main())
