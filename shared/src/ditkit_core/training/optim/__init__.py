"""Optimizers, their states, and how gradients are summed, clipped and applied.

It may import the sibling config. Start reading at optimizer.py.
"""
