"""What each of two ranks does for `test_ranks.py`."""

from wan_items import Clips

from ditkit_core.testing.ranks import as_rank
from ditkit_core.testing.sharded_steps import steps

if __name__ == "__main__":
    as_rank(lambda: steps(Clips.spec, Clips.arch, Clips().items(2)))
