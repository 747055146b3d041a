"""`python -m ditkit_zimage.train` is the command zimage-train: torchrun starts a module by its
name."""

import sys

from ditkit_zimage.cli import train

if __name__ == "__main__":
    sys.exit(train())
