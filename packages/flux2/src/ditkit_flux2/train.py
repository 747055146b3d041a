"""`python -m ditkit_flux2.train` is the command flux2-train: torchrun starts a module by its
name."""

import sys

from ditkit_flux2.cli import train

if __name__ == "__main__":
    sys.exit(train())
