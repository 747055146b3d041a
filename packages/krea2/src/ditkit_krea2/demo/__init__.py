"""The demo: generated images with captions, and a complete tiny checkpoint to train on them."""
