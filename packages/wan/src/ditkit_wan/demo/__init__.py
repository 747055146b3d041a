"""The demo of Wan: a tiny checkpoint and generated media.

Start reading at write.py; demo.toml is its run file.
"""
