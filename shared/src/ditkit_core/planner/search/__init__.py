"""Searches settings and partitions that fit (`--fit`).

It may import the planner's modules of memory, time and partition. Start reading at fit.py.
"""
