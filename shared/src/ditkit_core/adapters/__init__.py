"""Adapters and exported models: inject, read, write, convert, inspect, verify.

It may import the folders from execution downwards. Start reading at inject.py.
"""
