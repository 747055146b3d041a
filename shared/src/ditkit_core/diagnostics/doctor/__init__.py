"""The dataset doctor: findings about data, conditions, memory and two trial steps.

It may import the folders from run downwards. Start reading at findings.py, then dataset.py.
"""
