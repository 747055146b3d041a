"""The demo of Zed."""
