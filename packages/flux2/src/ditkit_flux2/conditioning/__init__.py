"""What FLUX.2 is conditioned on besides text: reference images, and the sizes at which they are
encoded.

Start reading at references.py.
"""
