"""Proof of a model: the conformance checks that any package runs, and a toy model that passes them."""
