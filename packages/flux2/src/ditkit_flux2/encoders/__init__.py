"""The frozen encoders of FLUX.2: VAE, text, images.

Libraries' modules, filled from files. Start reading at vae.py.
"""
