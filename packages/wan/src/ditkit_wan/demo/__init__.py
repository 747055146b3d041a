"""The demo of Wan: a tiny trained checkpoint, generated clips, and tiny checkpoints of every
variant with random weights.

Start reading at write.py; demo.toml is its run file.
"""
