"""The frozen encoders of Wan: both VAEs, the UMT5 text encoder and the CLIP image encoder.

The modules come from diffusers and transformers; the core fills them from files. Start reading at
vae.py.
"""
