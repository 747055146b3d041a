"""The frozen encoders of Wan: VAE, text, images.

Libraries' modules, filled from files. Start reading at vae.py.
"""
