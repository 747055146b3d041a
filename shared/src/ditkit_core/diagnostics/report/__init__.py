"""A run's HTML report, a function of the run's folder.

It may import the folders from run downwards. Start reading at page.py, and its template page.html.
"""
