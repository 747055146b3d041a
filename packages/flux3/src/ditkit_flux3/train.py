"""`python -m ditkit_flux3.train` is the command flux3-train: torchrun starts a module by its name."""

import sys

from ditkit_flux3.cli import train

if __name__ == "__main__":
    sys.exit(train())
