"""What Wan is conditioned on besides text, as columns of a dataset and what encodes them.

Start reading at columns.py.
"""
