"""What model families share: diffusers' VAEs, language models and T5 as text encoders, Euler's
sampler.

Start reading at spec.py, which makes a spec of few values. The libraries' classes are given by name
and imported when they are used. It may import the folders from adapters downwards.
"""
