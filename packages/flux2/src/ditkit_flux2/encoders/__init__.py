"""The frozen encoders of FLUX.2: the VAE, and the text encoders with their prompt templates.

The modules come from diffusers and transformers; the core fills them from files. Start reading at vae.py.
"""
