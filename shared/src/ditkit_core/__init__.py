"""The shared core of ditkit."""

__version__ = "0.1.0"
