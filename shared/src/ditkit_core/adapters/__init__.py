"""Adapters and exported models: inject, read, write, convert, inspect, verify.

It may import the folders from encoding, sampling, weights and engine downwards. Start reading at inject.py.
"""
