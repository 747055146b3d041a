"""Encoding of samples into cached latents and text embeddings, and micro-batches from the cache.

It may import the folders from distributed downwards. Start reading at encode.py, which writes the
cache, and loader.py, which reads it.
"""
