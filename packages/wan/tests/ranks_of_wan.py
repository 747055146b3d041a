"""What each of two ranks does for `test_ranks.py`."""

from ditkit_core.testing.ranks import as_rank
from ditkit_core.testing.sharded_steps import steps
from test_conformance import TestWan

if __name__ == "__main__":
    as_rank(lambda: steps(TestWan.spec, TestWan.arch, TestWan().items(2)))
