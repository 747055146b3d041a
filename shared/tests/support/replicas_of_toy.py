"""What the ranks do for `training/test_replicas.py`; with `all` as second argument, each change of their number."""

import sys

from ditkit_core.testing.replicas import CASES, main
from ditkit_core.testing.toy import TOY, ToyArch, toy_items

WORLDS = (1, 2, 3, 4)
EVERY = tuple((first, second) for first in WORLDS for second in WORLDS)
DAILY = ((1, 3), (3, 2))

if __name__ == "__main__":
    continued = EVERY if "all" in sys.argv else DAILY
    arch, items, shared = ToyArch(dim=16, depth=2), toy_items(6, ragged=True), ((2, 2), (4, 2))
    worlds = WORLDS if "all" in sys.argv else WORLDS[:3]
    main(TOY, arch, items, worlds=worlds, continued=continued, cases=[*CASES], shared=shared)
