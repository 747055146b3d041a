"""`python -m ditkit_krea2.train` is the command krea2-train: torchrun starts a module by its name."""

import sys

from ditkit_krea2.cli import train

if __name__ == "__main__":
    sys.exit(train())
