"""What the ranks do for `planner/ranks/test_traffic.py`."""

from ditkit_core.testing.rank_plans import RankCase, main
from ditkit_core.testing.toy import TOY, ToyArch

ARCH, SIZE = ToyArch(dim=256, depth=4, heads=4), (1, 16, 16)
CASES = {
    "two replicas": RankCase(),
    "three replicas of eight micro-batches": RankCase(ranks=3, micro_batches=8, policy="none"),
    "replicas of all weights": RankCase(method="full", micro_batches=4),
    "two shards of eight micro-batches": RankCase(shard=2, micro_batches=8, policy="none"),
    "two shards of all weights": RankCase(shard=2, method="full", micro_batches=4),
    "two shards, repeated": RankCase(ranks=4, shard=2, micro_batches=4),
    "two ranks that share samples": RankCase(context=2, policy="attn_only"),
    "two shards that share samples": RankCase(context=2, shard=2, micro_batches=1),
}

if __name__ == "__main__":
    main(TOY, ARCH, SIZE, CASES)
