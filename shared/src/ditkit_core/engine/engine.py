"""Activation checkpointing at the seam: the engine calls each block through a policy.

Nothing is wrapped and no name changes. The carry's tensors are handed to a checkpoint one by one and the carry is rebuilt inside:
checkpoints of every kind see only top-level tensor arguments, and one that they miss loses its gradient or is freed twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.ac_schedule import ACSchedule, ScheduleLike, as_schedule
from ditkit_core.engine.activation_offload import HostMemory, HostStore, can_offload
from ditkit_core.engine.block_hooks import Passage, marked
from ditkit_core.engine.compile import backend_of, check_compiled, check_traced, run_compiled
from ditkit_core.models.precision import autocast_disabled
from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.attention import AttentionSettings, attention_settings, calls_in_force

POLICIES = ("none", "full", "attn_only")
"""The policies that every other lever is tested with; `ac_schedule` knows them all."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Runs a whole forward, each block through its checkpoint policy and the attention backend.

    Passed to a model's `forward` as `run`. It is a plain value: it holds no parameter, and no state but host memory that is used again.
    """

    policy: ScheduleLike = "none"
    """Which block runs under which policy: a configuration's schedule, or its text, which is parsed once."""
    backend: str = "sdpa"
    compile: bool | str = False
    """Whether blocks that have a backward are compiled, or by which backend of torch's compiler (`compile.py`)."""
    passages: tuple[Passage, ...] = ()
    """Told where the carry enters and leaves a block, forward and backward: what streams weights through a device, or watches."""
    host: HostMemory = field(default_factory=HostMemory, compare=False, repr=False)
    """Where blocks whose policy offloads put what they keep."""

    def __post_init__(self) -> None:
        check_compiled(backend_of(self.compile), self.schedule.distinct)

    @cached_property
    def schedule(self) -> ACSchedule:
        """`policy`, parsed if it is a text."""
        return as_schedule(self.policy)

    def __call__(self, model: StagedModel, inputs: Any) -> Any:
        blocks = model.blocks()
        if not torch.is_grad_enabled():
            # Nothing is kept, and a schedule may name devices of the training that are not here.
            return self._forward(model, inputs, blocks, (Policy(),) * len(blocks))
        devices = [device_of(block) for block in blocks]
        policies = self.schedule.policies(devices)
        offloaded = [policy.offload for policy in policies]
        moves = (wanted and can_offload(device) for wanted, device in zip(offloaded, devices, strict=True))
        if not any(moves):
            return self._forward(model, inputs, blocks, policies)
        with HostStore(self.host, [model.embed, *blocks, model.head], offloaded) as store:
            run = replace(self, passages=(*self.passages, store))
            return run._forward(model, inputs, blocks, policies)

    def _forward(self, model: StagedModel, inputs: Any, blocks: Sequence[nn.Module], policies: Sequence[Policy]) -> Any:
        with autocast_disabled(next(iter(model.head.parameters())).device.type):
            carry, here = self._embed(model, inputs), device_of(model.embed)
            for index, (block, policy) in enumerate(zip(blocks, policies, strict=True)):
                # Once per boundary, and outside of the checkpoint: nothing is sent again for a block or a recompute.
                if (there := device_of(block)) not in (None, here):
                    carry, here = moved(carry, there), there
                carry = self._run(index, block, carry, policy)
            if (there := device_of(model.head)) not in (None, here):
                carry = moved(carry, there)
            if (calls := calls_in_force()) is not None:
                calls.check()
            return self._head(model, carry)

    def _embed(self, model: StagedModel, inputs: Any) -> Any:
        return model.embed(inputs)

    def _head(self, model: StagedModel, carry: Any) -> Any:
        return model.head(carry)

    def _run(self, index: int, block: nn.Module, carry: Any, policy: Policy) -> Any:
        name, passages = f"block {index}", self.passages
        if not passages or device_of(block) is None:
            return self._call(block, carry, policy, name)
        for passage in passages:
            passage.enter(index, block)
        after = self._call(block, carry, policy, name)
        for passage in passages:
            passage.leave(index, block, after)
        if not torch.is_grad_enabled():
            return after

        def backward() -> None:
            for passage in passages:
                passage.backward(index, block)

        return marked(carry, after, backward)

    def _call(self, block: nn.Module, carry: Any, policy: Policy, name: str) -> Any:
        run, device = partial(run_block, policy=policy, backend=self.backend, name=name), device_of(block)
        if not self.compile or not torch.is_grad_enabled() or device is None:
            return run(block, carry)
        if (calls := calls_in_force()) is not None and (type(block), policy) not in calls.traced:
            calls.traced.add((type(block), policy))
            check_traced(block, carry, run)
        backend = backend_of(self.compile)
        after = run_compiled(block, carry, policy=policy, attention=self.backend, backend=backend, device=device)
        return run(block, carry) if after is None else after


def device_of(stage: nn.Module) -> torch.device | None:
    """Where a stage's weights are; None if it has none, and runs wherever the carry is."""
    return next((parameter.device for parameter in stage.parameters()), None)


def moved(carry: Any, device: torch.device) -> Any:
    """A carry with all its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), carry)


def run_block(block: nn.Module, carry: Any, *, policy: Policy, backend: str = "sdpa", name: str) -> Any:
    """Run one block under a policy: carry in, carry out.

    A block without parameters (two streams become one) is run as it is: it has nothing worth repeating, and a checkpoint would hold its
    inputs, which by then nobody else does.

    Args:
        name: Names the checkpoint in memory reports; unique among the blocks of a model.
    """
    if not policy.recomputes or not torch.is_grad_enabled() or next(block.parameters(), None) is None:
        with attention_settings(AttentionSettings(backend=backend)):
            return block(carry)
    calls = calls_in_force()
    if calls is not None and policy.kept_attention is not None:
        calls.want(policy.kept_attention, str(policy))
    settings = AttentionSettings(backend=backend, keep=policy.kept_attention, calls=calls)
    again = replace(settings, recomputing=True)
    leaves, spec = tree_flatten(carry)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outline = [_static(leaf) for leaf in leaves]  # the body outlives the forward
    outcome: Any = None

    def body(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal outcome
        given = iter(tensors)
        inner = tree_unflatten([next(given) if leaf is _MADE else leaf for leaf in outline], spec)
        with attention_settings(settings if outcome is None else again):
            after, after_spec = tree_flatten(block(inner))
        if outcome is None:
            # What the block passed on unchanged keeps its identity and does not cross the checkpoint.
            position = {id(tensor): index for index, tensor in enumerate(tensors)}
            outcome = after_spec, [_Given(position[id(x)]) if id(x) in position else _static(x) for x in after]
        # As in the forward, whatever has its identity now: hooks on the block (FSDP2's) may differ in the recompute.
        return tuple(leaf for leaf, static in zip(after, outcome[1], strict=True) if static is _MADE)

    made = iter(policy.checkpoint(body, tensors, name))
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
