"""What the ranks do for the exhaustive part of `test_sharded.py`."""

from wan_items import Clips

from ditkit_core.testing.replicas import EVERY, SHARDED, main

if __name__ == "__main__":
    items = Clips().items(4, ragged=True)
    main(Clips.spec, Clips.arch, items, worlds=(1,), continued=(), cases=[*SHARDED], sharded=EVERY)
