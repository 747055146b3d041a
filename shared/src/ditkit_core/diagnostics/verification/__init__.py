"""Verifies the exports of a run with the program that will use them, while the run trains.

It may import the folders from planner downwards. Start reading at verifier.py.
"""
