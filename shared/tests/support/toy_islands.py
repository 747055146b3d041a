"""What each of two ranks does for `test_fsdp_precision.py`: dtypes in forward and recompute, and
blocks that are written in other ways."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from ditkit_core.distributed.fsdp import shard
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.precision import Precision
from ditkit_core.nn.attention.attention import attend
from ditkit_core.testing.sharded_steps import DTYPES, apart, differences, policies, step_of
from ditkit_core.testing.toy import TOY, ToyArch, ToyBlock, ToyCarry, toy_items
from ditkit_core.testing.world import make_model

ARCH = ToyArch(depth=2)


class IslandBlock(ToyBlock):
    """The toy's block as official models are written: under autocast, with islands in it.

    An island is `autocast(enabled=False)` here: on a CPU autocast knows no fp32.
    """

    def forward(self, carry: ToyCarry) -> ToyCarry:
        with torch.autocast(
            "cpu", dtype=torch.bfloat16, enabled=self.precision.matmul == torch.bfloat16
        ):
            x = carry.tokens
            with torch.autocast("cpu", enabled=False):
                shift, scale, gate = carry.modulation[:, :, None].unbind(1)
                h = F.layer_norm(x.float(), x.shape[-1:]) * (1 + scale) + shift
            q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(h).chunk(3, -1))
            y = self.out(attend(q, k, v, name="self", padding_mask=carry.padding_mask).flatten(2))
            with torch.autocast("cpu", enabled=False):
                x = x + y * gate
            q = self.query(x).unflatten(-1, (self.heads, -1))
            k, v = (
                t.unflatten(-1, (self.heads, -1)) for t in self.key_value(carry.text).chunk(2, -1)
            )
            x = x + attend(q, k, v, name="cross").flatten(2)
            return carry._replace(tokens=x + self.mlp(x))


class WeightsDtypeBlock(ToyBlock):
    """A block that takes the dtype of its matmuls from its weights, and widens what it is given."""

    def forward(self, carry: ToyCarry) -> ToyCarry:
        dtype, x = self.qkv.weight.dtype, carry.tokens.float()
        shift, scale, gate = carry.modulation.float()[:, :, None].unbind(1)
        h = (F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift).to(dtype)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(h).chunk(3, -1))
        y = attend(q, k, v, name="self", padding_mask=carry.padding_mask).flatten(2)
        x = x + gate * self.out(y).float()
        q = self.query(x.to(dtype)).unflatten(-1, (self.heads, -1))
        k, v = (
            t.unflatten(-1, (self.heads, -1))
            for t in self.key_value(carry.text.to(dtype)).chunk(2, -1)
        )
        x = x + attend(q, k, v, name="cross").flatten(2).float()
        return carry._replace(tokens=x + self.mlp(x.to(dtype)).float())


def model_of(
    block: type[ToyBlock],
    dtype: torch.dtype,
    arch: ToyArch = ARCH,
    stored: torch.dtype | None = None,
) -> Any:
    """A toy with other blocks, of the same parameters.

    Args:
        block: Their class.
        dtype: Of the matmuls.
        stored: Of all parameters; by default those that the toy has.
    """
    model: Any = make_model(TOY, arch, dtype=dtype)
    for layer in model.layers:
        layer.__class__ = block
    return model if stored is None else model.to(stored)


@contextmanager
def recompute_without_casts() -> Iterator[None]:
    """FSDP2 as it was up to torch 2.12: entered again for a backward, it handed inputs on as they
    were."""
    present = FSDPState._pre_forward

    def past(self: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if self._training_state.name == "PRE_BACKWARD":
            return args, kwargs
        return present(self, module, args, kwargs)

    FSDPState._pre_forward = past
    try:
        yield
    finally:
        FSDPState._pre_forward = present


@contextmanager
def as_it_is() -> Iterator[None]:
    """FSDP2 of the torch that is installed."""
    yield


FSDP: dict[str, Callable[[], Any]] = {"past": recompute_without_casts, "present": as_it_is}


def shard_with_casts(model: Any) -> None:
    """FSDP2 as its defaults have it: parameters and inputs of every block are cast."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    for unit in [*model.blocks(), model]:
        fully_shard(unit, mp_policy=policy)


def _step(model: Any, policy: str) -> dict[str, Tensor]:
    rank = dist.get_rank()
    return step_of(
        TOY, model, toy_items(2)[rank : rank + 1], BlockEngine(policy=policy), first=rank, of=2
    )


def written_otherwise(block: type[ToyBlock], fsdp: str) -> dict[str, Any]:
    """A block under FSDP2 with casts, recomputed: what the checkpoint complains of, or how far
    gradients are from those without it."""
    with FSDP[fsdp]():
        model = model_of(block, torch.bfloat16, stored=torch.float32)
        shard_with_casts(model)
        plain = _step(model, "none")
        try:
            found = _step(model, "full")
        except CheckpointError as error:
            return {"error": str(error)}
    return {"error": "", "differs": differences(found, plain), "apart": apart(found, plain)}


def ours(fsdp: str, dtype: str) -> dict[str, Any]:
    """Every policy: how it differs from none, and whether each block's recompute ran what its
    forward did, in the same dtypes."""
    table = {}
    with FSDP[fsdp]():
        model = model_of(ToyBlock, DTYPES[dtype])
        runs = watch(model)
        shard(model, Precision(matmul=DTYPES[dtype]))
        plain: dict[str, Tensor] = {}
        for policy in policies():
            with DtypesOfOps(runs):
                found = _step(model, policy)
            plain = plain or found
            recomputed = [of_block for of_block in runs.values() if len(of_block) > 1]
            table[policy] = {
                "differs": differences(found, plain),
                "recomputed": len(recomputed),
                "alike": all(is_part(again, first) for first, again in recomputed),
                "loss": found["loss"].item(),
            }
            runs.clear()
    return table


def dtypes_with_casts() -> bool:
    """Whether recomputes are alike for a block of which they are not: shows that the comparison
    sees it."""
    with recompute_without_casts():
        model = model_of(WeightsDtypeBlock, torch.bfloat16, stored=torch.float32)
        runs = watch(model)
        shard_with_casts(model)
        with DtypesOfOps(runs):
            _step(model, "full")
    return all(is_part(again, first) for first, again in runs.values())


Op = tuple[str, ...]
"""Name, dtypes of tensors that go in, dtypes of those that come out."""
Runs = dict[int, list[list[Op]]]
"""By block: the operations of its forward, then of its recompute."""


class DtypesOfOps(TorchDispatchMode):
    """Enters the operations of whatever block is running."""

    def __init__(self, runs: Runs) -> None:
        super().__init__()
        self._runs = runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _running and not func.is_view:  # of which a checkpoint makes its own
            self._runs[_running[-1]][-1].append((str(func), _dtypes((args, kwargs)), _dtypes(out)))
        return out


_running: list[int] = []


def watch(model: Any) -> Runs:
    """Have each block say when it runs; the first entry of a run is what it was given."""
    runs: Runs = {}
    for index, block in enumerate(model.blocks()):

        def forward(
            carry: Any, index: int = index, inner: Callable[[Any], Any] = block.forward
        ) -> Any:
            runs.setdefault(index, []).append([("given", _dtypes(carry))])
            _running.append(index)
            try:
                return inner(carry)
            finally:
                _running.pop()

        block.forward = forward
    return runs


def _dtypes(values: Any) -> str:
    return " ".join(str(leaf.dtype) for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def is_part(again: list[Op], first: list[Op]) -> bool:
    """Whether a run is the first one with some operations left out."""
    left = iter(first)
    return again[0] == first[0] and len(again) > 1 and all(op in left for op in again)
