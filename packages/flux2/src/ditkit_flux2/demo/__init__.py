"""The demo of FLUX.2: a tiny checkpoint with random weights, and generated images.

Start reading at write.py; demo.toml is its run file.
"""
