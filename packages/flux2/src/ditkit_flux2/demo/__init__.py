"""The demo of FLUX.2: a tiny checkpoint, generated images, and the place that they teach it.

Start reading at write.py; demo.toml is its run file, base/ has the trained weights.
"""
