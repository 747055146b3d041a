"""What FLUX.2 is conditioned on besides text, as columns of a dataset and what encodes them.

Start reading at references.py.
"""
