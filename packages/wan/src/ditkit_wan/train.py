"""`python -m ditkit_wan.train` is the command wan-train: torchrun starts a module by its name."""

import sys

from ditkit_wan.cli import train

if __name__ == "__main__":
    sys.exit(train())
