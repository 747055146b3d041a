"""What people read, as values: a `Document` of tables, texts and media, and how a terminal, a page
and JSON show it.

It may import the folders from io downwards. Start reading at document.py; html.py makes pages, and
tables.py aligns tables.
"""
