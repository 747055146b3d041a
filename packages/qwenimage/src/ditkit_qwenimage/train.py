"""`python -m ditkit_qwenimage.train` is the command qwenimage-train: torchrun starts a module by its name."""

import sys

from ditkit_qwenimage.cli import train

if __name__ == "__main__":
    sys.exit(train())
