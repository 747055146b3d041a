"""Modules that variants of Wan add to the transformer.

Each file is one addition; `transformer.py` puts them in by the architecture.
"""
