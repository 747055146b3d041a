"""The demo of Wan: tiny checkpoints with random weights, and generated clips.

Start reading at write.py; demo.toml is its run file.
"""
