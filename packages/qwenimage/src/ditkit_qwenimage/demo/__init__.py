"""The demo of Qwenimage."""
