"""`python -m ditkit_zed.train` is the command zed-train: torchrun starts a module by its name."""

import sys

from ditkit_zed.cli import train

if __name__ == "__main__":
    sys.exit(train())
