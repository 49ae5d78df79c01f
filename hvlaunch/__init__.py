"""hvlaunch: starts distributed PyTorch training on every machine that you can ssh into."""

__all__ = ["__version__"]

__version__ = "0.1.0"
