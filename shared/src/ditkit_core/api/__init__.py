"""What `import ditkit_core` offers: load, encode, sample, plan. Commands stand on it, and so do
loops of others.

It may import the folders from planner downwards. Start at load.py.
"""
