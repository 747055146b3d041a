"""What the ranks do for `test_replicas.py`."""

from flux2_items import Images

from ditkit_core.testing.replicas import main

WORLDS = (1, 2)
CONTINUED = ((2, 1),)

if __name__ == "__main__":
    items = Images().items(4, ragged=True)
    main(Images.spec, Images.arch, items, worlds=WORLDS, continued=CONTINUED, cases=("lora with dropout", "full"))
