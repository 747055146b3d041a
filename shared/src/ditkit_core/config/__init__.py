"""Configuration: dataclass fields, TOML files, command-line flags, and the keys that may change on
resume.

It may import the folders from errors downwards. Start reading at schema.py, then resolve.py.
"""
