"""What each of two ranks does for `test_ranks.py`."""

from flux2_items import Images

from ditkit_core.testing.ranks import as_rank
from ditkit_core.testing.sharded_steps import steps

if __name__ == "__main__":
    as_rank(lambda: steps(Images.spec, Images.arch, Images().items(2)))
