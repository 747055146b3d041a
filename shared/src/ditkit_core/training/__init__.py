"""The training loop: step, optimizer, weight average, checkpoints, validation, metrics.

It may import the folders from loading downwards. Start reading at trainer.py, then train_step.py.
"""
