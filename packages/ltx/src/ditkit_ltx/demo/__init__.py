"""The demo: generated clips with captions, and a complete tiny checkpoint to train on them."""
