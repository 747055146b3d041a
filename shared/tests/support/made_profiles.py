"""Profiles put together by hand, for what works on profiles alone."""

from collections.abc import Callable
from dataclasses import replace

from ditkit_core.planner.memory import ParameterRows, Profile, StageCost
from ditkit_core.planner.memory_tracker import Kernel, KernelCounts
from ditkit_core.run.config import RunConfig

GIB, MIB, TERA = 2**30, 2**20, 10**12

_KEPT = {"none": 1200, "attn_only": 220, "full": 100, "full+offload": 0}
_TERA_BACKWARD = {"none": 20, "attn_only": 27, "full": 30, "full+offload": 30}
_SENT = 100
"""MiB that a block with activations on the host sends there."""
_STORED = {"none": 1.0, "int8": 0.5, "fp8": 0.5, "nf4": 0.28}


def products(flops: int, number: int = 1) -> KernelCounts:
    """Matmuls of so many floating-point operations each, so wide that their time is that of their
    arithmetic."""
    return frozenset({(Kernel("matmul_16", flops, 0), number)})


def made_profile(
    policy: str = "full",
    quantize: str = "none",
    *,
    num_blocks: int = 12,
    block_gib: float = 1.0,
    work: float = 1.0,
) -> Profile:
    """A model of equal blocks, with a step that keeps and recomputes what the policy does.

    Args:
        policy: Of checkpointing.
        quantize: What its frozen weights are held in.
        num_blocks: How many.
        block_gib: GiB of a block's weights in bf16.
        work: What bytes of activations and arithmetic are multiplied with.
    """
    sent = int(_SENT * work * MIB) * policy.endswith("+offload")
    block = StageCost(
        on_host=sent,
        rows=(ParameterRows(1, 1, False),),  # a block without any has no policy
        weights=int(block_gib * _STORED[quantize] * GIB),
        adapters=8 * MIB,
        gradients=8 * MIB,
        optimizer=16 * MIB,
        kept=int(_KEPT[policy] * work * MIB),
        released=int(_KEPT[policy] * work * MIB),
        forward_extra=int(300 * work * MIB),
        backward_extra=int(1300 * work * MIB) + sent,
        backward_extra_again=int(1310 * work * MIB) + sent,
        kernels_forward=products(int(work * TERA), 10),
        kernels_backward=products(int(work * TERA), _TERA_BACKWARD[policy]),
    )
    end = StageCost(
        weights=200 * MIB,
        kept=int(100 * work * MIB),
        released=int(100 * work * MIB),
        kernels_forward=products(TERA // 10),
    )
    return Profile(
        embed=end,
        blocks=(block,) * num_blocks,
        head=replace(end, kernels_backward=products(TERA // 10)),
        crossing=(int(120 * work * MIB),) * (num_blocks + 1),
        crossing_back=(int(100 * work * MIB),) * (num_blocks + 1),
    )


def made_full_profiles(config: RunConfig) -> Callable[[str, str], Profile]:
    """A profile of a full fine-tune whose bytes follow from how its weights are stored and
    updated."""
    optim = config.optim
    weights = 4 if config.model.dtype == "fp32" else 2
    state = {"adamw": 8, "adamw8bit": 2, "adafactor": 0}[optim.name] + 2 * (
        optim.rounding == "split"
    )

    def profile_of(policy: str, quantize: str) -> Profile:
        made = made_profile(policy, quantize)
        gib = made.blocks[0].weights // 2

        def trained(stage: StageCost) -> StageCost:
            size = gib * (stage in made.blocks)
            gradients = 0 if optim.fused_backward else weights * size
            return replace(
                stage,
                weights=0,
                adapters=weights * size,
                gradients=gradients,
                optimizer=state * size,
            )

        blocks = tuple(trained(block) for block in made.blocks)
        return replace(
            made,
            embed=trained(made.embed),
            head=trained(made.head),
            blocks=blocks,
            trains_all=True,
            attention=("self",),
        )

    return profile_of
