"""What the ranks do for `test_sharded.py`: samples of several sizes, each token with a time of its own."""

from context_of_wan import SUBJECTS
from sharded_of_wan import BOTH, FEW

from ditkit_core.testing.replicas import main

if __name__ == "__main__":
    subject = SUBJECTS["time of each token"]
    main(subject.spec, subject.arch, subject.items, worlds=(1,), continued=(), cases=FEW, sharded=BOTH)
