"""What each of two ranks does for `test_fsdp.py`, `test_fsdp_precision.py` and `test_shares.py`:
all cases in one process, for starting it takes seconds."""

import itertools
import sys
from typing import Any

import toy_collectives as collectives
import toy_islands as islands
import toy_samples

from ditkit_core.testing.ranks import as_rank
from ditkit_core.testing.sharded_steps import steps
from ditkit_core.testing.toy import TOY, ToyArch, toy_items

ARCH = ToyArch(depth=2)


def prefetch(model: Any) -> None:
    """Gather each block's parameters while the one before it runs, forward and backward."""
    blocks = model.blocks()
    for before, after in itertools.pairwise(blocks):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


COMBINATIONS = (("full", "fp32"), ("lora", "bf16"), ("lora with dropout", "fp32"))
"""What is trained, and the dtype, under every policy; the other two of `full` and `lora` daily
under one policy each."""
OTHERS = {("full", "bf16"): "attn_only", ("lora", "fp32"): "full"}


def every_step() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for trained, dtype in COMBINATIONS:
        found |= steps(TOY, ARCH, toy_items(4), trained=(trained,), dtypes=(dtype,))
    for (trained, dtype), policy in OTHERS.items():
        found |= steps(
            TOY, ARCH, toy_items(4), trained=(trained,), dtypes=(dtype,), chosen=("none", policy)
        )
    return found


def others() -> dict[str, Any]:
    """Those two under every policy."""
    found: dict[str, Any] = {}
    for trained, dtype in OTHERS:
        found |= steps(TOY, ARCH, toy_items(4), trained=(trained,), dtypes=(dtype,))
    return {"steps": found}


def work() -> dict[str, Any]:
    written = {"islands": islands.IslandBlock, "weights' dtype": islands.WeightsDtypeBlock}
    return {
        "steps": every_step(),
        "prefetched": steps(
            TOY,
            ARCH,
            toy_items(4),
            trained=("lora",),
            dtypes=("bf16",),
            prepare=prefetch,
            updates=1,
        ),
        "attention": collectives.attention_over_ranks(),
        "attention is right": collectives.attention_over_ranks_is_attention(),
        "in an mlp": collectives.collective_in_an_mlp(),
        "two dtypes": collectives.tables_of_another_dtype(),
        "whole": collectives.gradients_of_whole_parameters(),
        "refused": collectives.refusals(),
        "written otherwise": {
            f"{name}/{fsdp}": islands.written_otherwise(block, fsdp)
            for name, block in written.items()
            for fsdp in islands.FSDP
        },
        "ours": {
            f"{fsdp}/{dtype}": islands.ours(fsdp, dtype)
            for fsdp in islands.FSDP
            for dtype in ("fp32", "bf16")
        },
        "dtypes with casts": islands.dtypes_with_casts(),
        "samples": toy_samples.over_ranks(),
    }


if __name__ == "__main__":
    as_rank(others if "others" in sys.argv else work)
