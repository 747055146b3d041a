"""Wan 2.x for ditkit."""

__version__ = "0.1.0"
