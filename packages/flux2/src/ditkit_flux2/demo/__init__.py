"""The demo of FLUX.2: a tiny checkpoint and generated media.

Start reading at write.py; demo.toml is its run file.
"""
