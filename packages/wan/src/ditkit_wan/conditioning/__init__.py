"""What Wan is conditioned on besides text: the columns of a dataset (images, control videos,
cameras, VACE, music) and their conditioners.

Start reading at columns.py.
"""
