"""What the ranks do for `test_sharded.py`, in every world."""

from flux2_items import Images

from ditkit_core.testing.replicas import EVERY, SHARDED, main

if __name__ == "__main__":
    items = Images().items(4, ragged=True)
    main(Images.spec, Images.arch, items, worlds=(1,), continued=(), cases=[*SHARDED], sharded=EVERY)
