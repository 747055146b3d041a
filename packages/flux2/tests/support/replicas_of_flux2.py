"""What the ranks do for `test_replicas.py`."""

from flux2_items import Images

from ditkit_core.testing.replicas import main

if __name__ == "__main__":
    main(Images.spec, Images.arch, Images().items(4, ragged=True))
