"""What the ranks do for the exhaustive part of `training/test_replicas.py`."""

from replicas_of_toy import ARCH, EVERY, ITEMS, SHARED, WORLDS

from ditkit_core.testing.replicas import CASES, main
from ditkit_core.testing.toy import TOY

if __name__ == "__main__":
    main(TOY, ARCH, ITEMS, worlds=WORLDS, continued=EVERY, cases=[*CASES], shared=SHARED)
