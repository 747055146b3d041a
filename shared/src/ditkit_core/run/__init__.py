"""A run as a list of jobs: its configuration, data, checks and training; plans/ has what it needs.

It may import the folders from api downwards. Start reading at jobs.py, then checks.py.
"""
