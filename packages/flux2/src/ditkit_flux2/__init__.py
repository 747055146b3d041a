"""FLUX.2 for ditkit."""

__version__ = "0.1.0"
