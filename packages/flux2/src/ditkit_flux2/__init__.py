"""FLUX.2 for ditkit. Start reading at spec.py.

model/ has the transformer, encoders/ the frozen VAE and text encoders, conditioning/ the sizes of reference images, demo/ a tiny model.
"""

__version__ = "0.1.0"
