"""A page in the browser for the runs of ditkit's families. Start reading at cli.py."""

__version__ = "0.1.0"
