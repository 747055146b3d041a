"""What the ranks do for the exhaustive part of `training/test_sharded.py`."""

from sharded_of_toy import work

if __name__ == "__main__":
    work()
