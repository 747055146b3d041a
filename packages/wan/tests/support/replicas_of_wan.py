"""What the ranks do for `test_replicas.py`."""

from wan_items import Clips

from ditkit_core.testing.replicas import main

if __name__ == "__main__":
    main(Clips.spec, Clips.arch, Clips().items(4, ragged=True))
