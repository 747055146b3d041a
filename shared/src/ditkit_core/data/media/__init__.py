"""Decoding and writing of video clips and images.

It may import the folders from models downwards. Start reading at clip.py.
"""
