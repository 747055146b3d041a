"""The work of every rank in the checks of a sharded model: steps of any family under every policy,
as a table for JSON.

Run by a script in each rank (`ranks.as_rank`); `check_steps` asserts on what came back.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ditkit_core.distributed.fsdp import check_reduced, shard
from ditkit_core.engine.ac_schedule import MAKERS, parse_schedule
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine as Run
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.observer import Observer
from ditkit_core.testing.world import (
    ADAPTERS,
    DTYPES,
    Items,
    differing,
    is_attention_forward,
    largest,
    make_model,
)

TRAINED = ("full", "lora")

TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
"""Two ranks against one with the joined batch, relative to the norm of a gradient. A sum over
tokens is taken in two parts: an order of additions in fp32 (roundings of 6e-8, a few dozen of
them); in bf16 each part is rounded (4e-3), and so is what comes of a rounding in each block."""


def policies() -> list[str]:
    """Every kind of policy, alone and offloaded, some for parts of attention or of the blocks; a
    new kind joins by itself."""
    on_device = [kind for kind in MAKERS if not parse_schedule(kind).rules[0].policy.offload]
    offloaded = [f"{kind}+offload" for kind in on_device]
    texts = [*MAKERS, *offloaded, "attn_only(self)", "every_n(2)", "full, 0=none"]
    return ["none", *(text for text in texts if text != "none")]


class Calls(Observer):
    """Counts operations below autograd: collectives by their names, and forwards of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.attention = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional")) and "wait" not in name:
            self.collectives[name.split(".")[1].strip("_")] += 1
        self.attention += is_attention_forward(func)
        return func(*args, **(kwargs or {}))


class Step(TypedDict):
    """One forward and backward."""

    differs: list[str]
    """Names of values that are not bitwise identical to the values of the same step under
    `none`."""
    apart: float
    """The largest relative distance of a gradient under `none` from the gradient of one rank on the
    joined batch."""
    collectives: dict[str, int]
    attention: int
    """Forwards, recomputed ones included."""
    without: list[str]
    """What is trained and has no gradient."""
    unreduced: str
    """What `check_reduced` says."""


def step_of(
    spec: ModelSpec, model: Any, items: Items, run: Run, *, first: int = 0, of: int
) -> dict[str, Tensor]:
    """Loss and gradients of one step, as this rank has them.

    Args:
        items: Of this rank.
        first: Their place in the joined batch.
        of: Samples of the joined batch: it says which noise level each has.
    """
    sigma = torch.linspace(0.3, 0.8, of)[first : first + len(items)]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    outputs = model(
        spec.training.make_inputs([item["latents"] for item in items], sigma, items, 1.0), run
    )
    loss = torch.stack([output.float().square().mean() for output in outputs]).mean()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "loss": loss.detach(),
        **{name: gradient.clone() for name, gradient in gradients.items()},
    }


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors whose values on this rank differ, as `differing` finds them."""
    here, there = (
        {name: _local(tensor) for name, tensor in tensors.items()} for tensors in (actual, expected)
    )
    return differing(here, there)


def apart(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest relative distance of a gradient; every rank asks at once."""
    pairs = (
        (_whole(actual[name]).double(), _whole(expected[name]).double())
        for name in expected
        if name != "loss"
    )
    return largest(((a - b).norm() / b.norm()).item() for a, b in pairs)


def steps(
    spec: ModelSpec,
    arch: Any,
    items: Items,
    *,
    trained: Sequence[str] = TRAINED,
    dtypes: Sequence[str] = tuple(DTYPES),
    chosen: Sequence[str] | None = None,
    prepare: Callable[[Any], None] | None = None,
    updates: int = 0,
) -> dict[str, Step]:
    """Every policy under FSDP2, for what is trained and each dtype, by `trained/dtype/policy`.

    Args:
        items: Of all ranks, as many for each; of one size, so that joining them pads none.
        trained: Of `world.ADAPTERS`.
        dtypes: Of `DTYPES`.
        chosen: Policies, with `none` as the first; None for every one.
        prepare: Called with the sharded model.
        updates: Steps of gradient descent after the first; what is compared is the last.
    """
    table: dict[str, Step] = {}
    share = len(items) // dist.get_world_size()
    first = share * dist.get_rank()
    local_items = items[first : first + share]
    for adapter in trained:
        for dtype in dtypes:
            settings = {"dtype": DTYPES[dtype], "adapter": ADAPTERS[adapter]}
            alone = make_model(spec, arch, **settings)  # type: ignore[arg-type]
            joined = step_of(spec, alone, items, BlockEngine(), of=len(items))
            model: Any = make_model(spec, arch, **settings)  # type: ignore[arg-type]
            shard(model, Precision(matmul=DTYPES[dtype]))
            if prepare is not None:
                prepare(model)
            values = {name: _local(p).detach().clone() for name, p in model.named_parameters()}
            plain, distance = dict[str, Tensor](), 0.0
            for policy in chosen or policies():
                run = BlockEngine(policy=policy)
                with Calls() as calls:
                    gradients = step_of(spec, model, local_items, run, first=first, of=len(items))
                if not plain:
                    distance = apart(gradients, joined)
                for _ in range(updates):
                    _update(model, gradients)
                    gradients = step_of(spec, model, local_items, run, first=first, of=len(items))
                if updates:
                    _restore(model, values)
                plain = plain or gradients
                table[f"{adapter}/{dtype}/{policy}"] = Step(
                    differs=differences(gradients, plain),
                    apart=distance,
                    collectives=dict(calls.collectives),
                    attention=calls.attention,
                    unreduced=refused(model),
                    without=[
                        n
                        for n, p in model.named_parameters()
                        if p.requires_grad and n not in gradients
                    ],
                )
    return table


@torch.no_grad()
def _update(model: Any, gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in gradients:
            _local(parameter).sub_(0.1 * _local(gradients[name]))


@torch.no_grad()
def _restore(model: Any, values: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        _local(parameter).copy_(values[name])


def cases(trained: Sequence[str] = TRAINED, dtypes: Sequence[str] = tuple(DTYPES)) -> list[str]:
    """The keys of what `steps` returns."""
    return [
        f"{adapter}/{dtype}/{policy}"
        for adapter in trained
        for dtype in dtypes
        for policy in policies()
    ]


def check_step(tables: Sequence[Mapping[str, Step]], case: str) -> None:
    """Assert of one case that a policy changes no bit and no collective, and that ranks together
    are one with the joined batch."""
    adapter, dtype, _ = case.split("/", 2)
    for table in tables:
        plain, step = table[f"{adapter}/{dtype}/none"], table[case]
        assert step["differs"] == []
        assert step["collectives"] == plain["collectives"]
        assert (
            step["collectives"]["allgather_base"] > 0
            and step["collectives"]["reduce_scatter_base"] > 0
        )
        assert step["without"] == [] and step["unreduced"] == ""
        if "dropout" not in adapter:  # whose masks depend on which rank samples them
            assert step["apart"] < TOLERANCE[dtype]


def refused(model: Any) -> str:
    """What `check_reduced` says of a model; empty if it takes it."""
    try:
        check_reduced(model)
    except UserError as error:
        return str(error)
    return ""
