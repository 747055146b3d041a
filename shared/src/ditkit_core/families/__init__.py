"""What model families share, for their packages: diffusers' VAEs, language models as text encoders, the Euler sampler, the memory of all of them.

Start reading at spec.py: it makes a spec of few values, among them a `VaeFamily` and a `TextEncoding`. The libraries' classes are given by
name and imported when they are used. It may import the folders from adapters downwards.
"""
