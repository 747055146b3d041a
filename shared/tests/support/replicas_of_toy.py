"""What the ranks do for `training/test_replicas.py`."""

from ditkit_core.testing.replicas import CASES, main
from ditkit_core.testing.toy import TOY, ToyArch, toy_items

WORLDS = (1, 2, 3, 4)
EVERY = tuple((first, second) for first in WORLDS for second in WORLDS)
DAILY = ((1, 3), (3, 2))
ELSEWHERE = ("lora with dropout", "lora, five micro-batches", "lokr", "full")
"""The daily cases of three replicas, and of ranks that share tokens."""
SHARED = ((2, 2), (4, 2))
ARCH, ITEMS = ToyArch(dim=16, depth=2), toy_items(6, ragged=True)

if __name__ == "__main__":
    main(TOY, ARCH, ITEMS, worlds=WORLDS[:2], cases=[*CASES])
    main(TOY, ARCH, ITEMS, worlds=WORLDS[2:3], continued=DAILY, cases=ELSEWHERE, shared=SHARED)
