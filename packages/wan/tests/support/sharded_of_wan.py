"""What the ranks do for `test_sharded.py`."""

from wan_items import Clips

from ditkit_core.testing.replicas import Divided, main

WORLDS = (Divided(4, 2), Divided(4, 2, context=2))
BOTH = WORLDS[1:]
"""Where ranks divide the weights and share tokens, too."""
CASES = ("lora, five micro-batches", "full", "full in bf16, split", "lora on int8")
FEW = CASES[:2]

if __name__ == "__main__":
    items = Clips().items(4, ragged=True)
    main(Clips.spec, Clips.arch, items, worlds=(1,), continued=(), cases=CASES, sharded=WORLDS)
