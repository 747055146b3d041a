"""Proof of a model: the conformance checks that any package runs, and a toy model that passes them.

It may import all other folders. Start reading at conformance.py.
"""
