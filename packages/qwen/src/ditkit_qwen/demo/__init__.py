"""The demo of Qwen."""
