"""Prompts to pixels: the denoising loop and the files it writes.

It may import the folders from distributed downwards. Start reading at denoise.py.
"""
