"""`python -m ditkit_ltx.train` is the command ltx-train: torchrun starts a module by its name."""

import sys

from ditkit_ltx.cli import train

if __name__ == "__main__":
    sys.exit(train())
