"""Activation checkpointing: what a block keeps for its backward, decided at the seam.

The engine *calls* a block through a policy, so nothing is wrapped and no name changes. A policy hands the carry's tensors
to the checkpoint one by one and rebuilds the carry inside: checkpoints of every kind see only top-level tensor
arguments, and one that they miss loses its gradient or is freed twice.

`full` is `torch.utils.checkpoint`, which stops recomputing as soon as the last saved tensor is back (torch_remat runs
the block to its end: one more large matmul per block). `attn_only` is torch_remat, which can keep a region.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch_remat as remat
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ditkit_core.attention import AttentionSettings, attention_settings
from ditkit_core.errors import UserError
from ditkit_core.model import StagedModel
from ditkit_core.passage import Passage, marked
from ditkit_core.precision import autocast_disabled

POLICIES = ("none", "full", "attn_only")


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs a whole forward, each block through the checkpoint policy and the attention backend.

    Passed to a model's `forward` as `run`. It is a plain value: it holds no parameter and no state.
    """

    policy: str = "none"
    """`none` keeps everything, `full` recomputes each block, `attn_only` recomputes all but attention."""
    backend: str = "sdpa"
    passage: Passage | None = None
    """Told where the carry enters and leaves a block, forward and backward: what streams weights through a device."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UserError(f"unknown checkpointing policy {self.policy!r}; choose one of {', '.join(POLICIES)}")

    def __call__(self, model: StagedModel, inputs: Any) -> Any:
        settings = AttentionSettings(backend=self.backend, keep=self.policy == "attn_only")
        with autocast_disabled(next(iter(model.head.parameters())).device.type):
            carry, here = self._embed(model, inputs), device_of(model.embed)
            for index, block in enumerate(model.blocks()):
                # Once per boundary, and outside of the checkpoint: nothing is sent again for a block or a recompute.
                if (there := device_of(block)) not in (None, here):
                    carry, here = moved(carry, there), there
                carry = self._run(index, block, carry, settings)
            if (there := device_of(model.head)) not in (None, here):
                carry = moved(carry, there)
            return self._head(model, carry)

    def _embed(self, model: StagedModel, inputs: Any) -> Any:
        return model.embed(inputs)

    def _head(self, model: StagedModel, carry: Any) -> Any:
        return model.head(carry)

    def _run(self, index: int, block: nn.Module, carry: Any, settings: AttentionSettings) -> Any:
        name, passage = f"block {index}", self.passage
        if passage is None or device_of(block) is None:
            return run_block(block, carry, policy=self.policy, settings=settings, name=name)
        passage.enter(index, block)
        after = run_block(block, carry, policy=self.policy, settings=settings, name=name)
        passage.leave(index, block)
        return marked(carry, after, lambda: passage.backward(index, block)) if torch.is_grad_enabled() else after


def device_of(stage: nn.Module) -> torch.device | None:
    """Where a stage's weights are; None if it has none, and runs wherever the carry is."""
    return next((parameter.device for parameter in stage.parameters()), None)


def moved(carry: Any, device: torch.device) -> Any:
    """A carry with all its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), carry)


def run_block(block: nn.Module, carry: Any, *, policy: str, settings: AttentionSettings, name: str) -> Any:
    """Run one block under a policy: carry in, carry out.

    A block without parameters (two streams become one) is run as it is: it has nothing worth repeating, and a checkpoint would hold its
    inputs, which by then nobody else does.

    Args:
        name: Names the checkpoint in memory reports; unique among the blocks of a model.
    """
    if policy == "none" or not torch.is_grad_enabled() or next(block.parameters(), None) is None:
        with attention_settings(settings):
            return block(carry)
    leaves, spec = tree_flatten(carry)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outcome: Any = None

    def body(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal outcome
        given = iter(tensors)
        inner = tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        with attention_settings(settings):
            after, after_spec = tree_flatten(block(inner))
        # What the block passed on unchanged keeps its identity and does not cross the checkpoint.
        position = {id(tensor): index for index, tensor in enumerate(tensors)}
        made = tuple(leaf for leaf in after if isinstance(leaf, Tensor) and id(leaf) not in position)
        if outcome is None:
            outcome = after_spec, [_Given(position[id(x)]) if id(x) in position else _static(x) for x in after]
        return made

    made = iter(_CHECKPOINTS[policy](body, tensors, name))
    after_spec, after = outcome
    rebuilt = [tensors[x.index] if isinstance(x, _Given) else next(made) if x is _MADE else x for x in after]
    return tree_unflatten(rebuilt, after_spec)


@dataclass(frozen=True)
class _Given:
    """A carry tensor that a block passed on: its position among the block's inputs."""

    index: int


_MADE = object()


def _static(leaf: Any) -> Any:
    """A leaf without its tensor: the outcome outlives the forward and must hold no memory."""
    return _MADE if isinstance(leaf, Tensor) else leaf


def _full(body: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], name: str) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = checkpoint(
        body,
        *tensors,
        use_reentrant=False,
        preserve_rng_state=False,  # it would fork the CPU's generator too, which blocks on other devices share
        context_fn=lambda: (nullcontext(), _Replay(GeneratorHook(tensors[0].device))),
    )
    return made


def _attn_only(body: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], name: str) -> tuple[Tensor, ...]:
    hook = GeneratorHook(tensors[0].device)
    made: tuple[Tensor, ...] = remat.checkpoint(region_name=name, recompute_state_hooks=(hook,))(body)(*tensors)
    return made


_CHECKPOINTS = {"full": _full, "attn_only": _attn_only}


@dataclass(frozen=True)
class GeneratorHook:
    """The generator that a block draws from: that of its own device and no other, for devices run backwards side by side.

    torch_remat asks for it around a region that it keeps, so that dropout stays aligned where the region is skipped.
    """

    device: torch.device

    def snapshot(self) -> Tensor:
        """The generator's state."""
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        """Put a snapshot back."""
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


class _Replay(AbstractContextManager[None]):
    """Around a recompute: draws what the forward drew, and leaves the generator as it was."""

    def __init__(self, hook: GeneratorHook):
        self._hook, self._at_entry = hook, hook.snapshot()

    def __enter__(self) -> None:
        self._outside = self._hook.snapshot()
        self._hook.restore(self._at_entry)

    def __exit__(self, *exception: object) -> None:
        self._hook.restore(self._outside)
