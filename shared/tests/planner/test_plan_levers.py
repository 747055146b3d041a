"""What a plan puts together from single stages, lever by lever, against whole steps of whole models
on fake tensors, as the trainer runs them."""

from dataclasses import replace

import pytest
import torch
from toy_jobs import toy_job
from whole_steps import DEPTH, agree

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.models.precision import Precision
from ditkit_core.planner.memory import Profile, StageCost, on_host
from ditkit_core.planner.profiler import profile
from ditkit_core.testing.toy import ToyArch
from ditkit_core.training.config import EMAConfig
from ditkit_core.training.optim.optimizers import OptimConfig

SMALL = {"arch": ToyArch(dim=256, depth=DEPTH), "size": (1, 32, 32)}
"""Of which a block's weights are more than what it keeps."""


@pytest.mark.slow
def test_an_assistant_next_to_a_dora_is_planned_for():
    """Of two layers of each block, resident and streamed."""
    ranks = {f"layers.{block}.{layer}": 16 for block in range(DEPTH) for layer in ("qkv", "mlp.0")}
    job = toy_job(checkpointing="full", **SMALL)
    job = replace(job, adapter=AdapterConfig(rank=4, use_dora=True))
    without = agree(job, (3,), (1, 3, 5))
    assert agree(replace(job, assistant=ranks), (3,), (1, 3, 5)) != without


# Pairs of values rather than all combinations: each case is a step of all blocks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "cuts", "streamed"),
    [
        ("full", (3,), (1, 3, 5)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("none", (), (3,)),
                ("none", (3,), range(DEPTH)),
                ("full", (), range(DEPTH)),
                ("attn_only", (), (1, 3, 5)),
                ("attn_only", (3,), (3,)),
            ]
        ),
    ],
)
def test_streamed_blocks_are_two_at_a_time(policy, cuts, streamed):
    agree(toy_job(checkpointing=policy, **SMALL), cuts, streamed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "optimizer", "cuts", "streamed"),
    [
        ("full", "adamw", (), (1, 3, 5)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("none", "adamw", (3,), range(DEPTH)),
                ("none", "adafactor", (), (1, 3, 5)),
                ("full", "adafactor", (3,), range(DEPTH)),
                ("none", "muon", (), range(DEPTH)),
                ("full", "muon", (3,), (1, 3, 5)),
            ]
        ),
    ],
)
def test_trained_weights_are_streamed_with_what_the_optimizer_keeps(
    policy, optimizer, cuts, streamed
):
    fused = {"optim": OptimConfig(name=optimizer, fused_backward=True), "clip_norm": 0.0}
    agree(
        toy_job("full", checkpointing=policy, ema=EMAConfig(decay=0.9), **SMALL, **fused),
        cuts,
        streamed,
    )


@pytest.mark.parametrize(
    ("clip_by", "micro_batches", "dtype", "cuts", "streamed"),
    [
        ("block", 2, torch.bfloat16, (), range(DEPTH)),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("last_step", 3, torch.float32, (3,), (1, 3, 5)),
                ("block", 1, torch.float32, (), ()),
                ("block", 1, torch.bfloat16, (3,), range(DEPTH)),
                ("last_step", 2, torch.bfloat16, (), ()),
            ]
        ),
    ],
)
@pytest.mark.slow
def test_an_update_in_the_backward_clips_and_sums(clip_by, micro_batches, dtype, cuts, streamed):
    """A block's gradients wait for each other; sums of micro-batches are the optimizer's, and are
    streamed with its state."""
    rounding = "stochastic" if dtype == torch.bfloat16 else "nearest"
    given = {
        "optim": OptimConfig(fused_backward=True, rounding=rounding),
        "precision": Precision(matmul=dtype),
    }
    of = toy_job(
        "full", checkpointing="full", micro_batches=micro_batches, clip_by=clip_by, **SMALL, **given
    )
    agree(of, cuts, streamed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("method", "cuts", "pipelined", "micro_batches"),
    [
        ("lora", (), False, 2),
        ("lora", (3,), True, 3),
        ("lora", (2, 4), True, 2),
        ("lora", (2, 4), False, 3),
        ("full", (), True, 2),
        ("full", (3,), False, 3),
        ("full", (2, 4), True, 3),
    ],
)
def test_micro_batches_one_by_one_and_at_once(method, cuts, pipelined, micro_batches):
    agree(
        toy_job(method, checkpointing="full", micro_batches=micro_batches),
        cuts,
        pipelined=pipelined,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("policy", "kind", "quantize"),
    [
        ("none", "cuda", "int8"),
        ("full", "cuda", "nf4"),
        ("full", "cuda", "fp8"),
        ("none", "cpu", "nf4"),
        ("full", "cpu", "int8"),
    ],
)
def test_a_quantized_weight_is_made_whole_while_it_is_multiplied(policy, kind, quantize):
    of = toy_job(checkpointing=policy, quantize=quantize, kind=kind, **SMALL)
    agree(of, ())
    if kind == "cuda":
        agree(of, (3,), (1, 3, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "cuts"), [("none", ()), ("full", (3,))])
def test_blocks_that_tokens_skip_have_their_memory_and_arithmetic(policy, cuts):
    """The range may begin on one device and end on another. Half of the tokens are under half of a
    block's arithmetic, for attention."""
    routed, plain = (toy_job(checkpointing=policy, token_routing=text) for text in ("1-4=0.5", ""))
    costs, all_tokens = agree(routed, cuts).blocks, profile(plain).blocks
    for index, (cost, other) in enumerate(zip(costs, all_tokens, strict=True)):
        inside = 1 <= index <= 4
        assert (cost.flops_forward < 0.51 * other.flops_forward) == inside
        assert (cost.kept < 0.6 * other.kept) == inside


@pytest.mark.slow
def test_matrices_in_several_formats_of_a_file_are_planned_one_by_one():
    formats = {"qkv": "nvfp4", "out": "mxfp8", "mlp.0": "int8_rotated_256"}
    stored = {
        f"layers.{block}.{layer}": kind
        for block in range(DEPTH - 1)
        for layer, kind in formats.items()
    }
    agree(replace(toy_job(checkpointing="full", **SMALL), stored=stored), (3,), (1, 3, 5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "cuts"), [("none", (3,)), pytest.param("full", (), marks=pytest.mark.exhaustive)]
)
def test_kernels_have_their_memory(policy, cuts):
    eager = profile(toy_job(checkpointing=policy, **SMALL)).blocks[2]
    block = agree(toy_job(checkpointing=policy, kernels="triton", **SMALL), cuts).blocks[2]
    assert block.kept < 1.1 * eager.kept


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cuts", "optimizer"), [((), "adamw"), ((3,), "adafactor"), ((3,), "muon")]
)
def test_an_update_in_the_backward_leaves_no_full_set_of_gradients(cuts, optimizer):
    fused = {"optim": OptimConfig(name=optimizer, fused_backward=True), "clip_norm": 0.0}
    agree(toy_job("full", checkpointing="full", **SMALL, **fused), cuts)


def test_the_host_has_what_is_streamed():
    block = StageCost(weights=100, adapters=7, optimizer=14, average=7)
    nothing = (0,) * (DEPTH + 1)
    found = Profile(
        embed=StageCost(),
        blocks=(block,) * DEPTH,
        head=StageCost(),
        crossing=nothing,
        crossing_back=nothing,
    )
    assert on_host(found, {1, 3}) == 200
    assert on_host(replace(found, trains_all=True), {1, 3}) == 2 * 128
