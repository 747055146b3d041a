"""Wan 2.x for ditkit. Start reading at spec.py.

model/ has the transformer, encoders/ the frozen VAEs, text encoder and CLIP, conditioning/ the encoders of a dataset's other columns, demo/ tiny models.
"""

__version__ = "0.1.0"
