"""Samples as cached latents and text embeddings, and micro-batches from the cache.

It may import the folders from data downwards. Start reading at encode.py writes the cache, loader.py reads it.
"""
