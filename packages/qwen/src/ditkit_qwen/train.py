"""`python -m ditkit_qwen.train` is the command qwen-train: torchrun starts a module by its name."""

import sys

from ditkit_qwen.cli import train

if __name__ == "__main__":
    sys.exit(train())
