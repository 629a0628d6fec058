"""The command line: ``python train.py fit --config configs/gift/digits.yaml``; see ``lightning_methods/cli.py``."""

from lightning_methods.cli import main

if __name__ == "__main__":
    main()
