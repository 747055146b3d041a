"""What the ranks do for the exhaustive part of `test_replicas.py`."""

from wan_items import Clips

from ditkit_core.testing.replicas import CASES, main

WORLDS = (1, 2, 3, 4)
CONTINUED = tuple((first, second) for first in WORLDS for second in WORLDS)

if __name__ == "__main__":
    main(Clips.spec, Clips.arch, Clips().items(4, ragged=True), worlds=WORLDS, continued=CONTINUED, cases=[*CASES])
