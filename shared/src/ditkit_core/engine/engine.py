"""The engine: a complete forward of a staged model, each block under its activation checkpointing
policy.

The engine itself only calls, stage by stage, small objects with one job each:

- `ACSchedule.policies` gives the policy of each block,
- `TokenRoute` takes the tokens out of the carry that skip blocks, and puts them back,
- `ContextParallel` divides the tokens among ranks, if several share them, and gathers them for the
  head,
- `DeviceHops` sends the carry to the device of the next stage,
- `offloading` moves to the host what blocks with an offloading policy keep,
- `HookedRunner` calls hooks where a block begins and ends, in forward and backward,
- `EagerRunner` runs a block under its policy.

No module is wrapped, and no parameter changes its name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.engine.ac_policies import Policy
from ditkit_core.engine.ac_schedule import ACSchedule, ScheduleLike, as_schedule
from ditkit_core.engine.activation_offload import HostMemory, offloading
from ditkit_core.engine.block_hooks import BlockHooks, HookedRunner, call_before_backward, timed
from ditkit_core.engine.run_block import EagerRunner
from ditkit_core.engine.token_route import TokenRouter
from ditkit_core.engine.token_routing import KEY as ROUTING
from ditkit_core.errors import UserError, argument
from ditkit_core.io.runtimes import sent_to
from ditkit_core.io.step_clock import StepClock
from ditkit_core.models.precision import autocast_disabled, compute_fp32_in_fp32
from ditkit_core.models.protocol import Stages
from ditkit_core.nn.context import BlockSettings, calls_in_force

POLICIES = ("none", "full", "attn_only")
"""The policies that every other lever is tested with; `ac_schedule` has all of them."""


@dataclass(frozen=True, kw_only=True)
class BlockEngine:
    """Runs a complete forward, each block under its checkpointing policy and with the attention
    backend.

    Passed to a model's `forward`. It is a plain value: it has no parameters, and no state but host
    memory for reuse.
    """

    policy: ScheduleLike = "none"
    """Which block runs under which policy: a configuration's schedule or its text, which is parsed
    once."""
    backend: str = "sdpa"
    kernels: str = "torch"
    """Implementation of norms, rotations, gated units and parts of LoRA and quantized layers:
    `torch`, or `triton` for the kernels of `nn/kernels/`."""
    hooks: tuple[BlockHooks, ...] = ()
    """Called where the carry enters and leaves a block, in forward and backward: for block swap and
    statistics."""
    context: ContextParallel | None = None
    """Divides the tokens of each sample among ranks; None if this process has all of them."""
    router: TokenRouter | None = None
    """Has some tokens skip blocks in forwards with a backward; None if all tokens go through all
    blocks."""
    clock: StepClock = field(default_factory=StepClock, compare=False, repr=False)
    """Times blocks in forward and backward, and their recomputes. The times of hooks are
    `copies`."""
    host: HostMemory = field(default_factory=HostMemory, compare=False, repr=False)
    """Host memory for the tensors of blocks whose policy offloads. Shared by all forwards, so that
    buffers are allocated once."""

    def __post_init__(self) -> None:
        as_schedule(self.policy)  # a mistake in it is refused here, and not in the first forward
        if self.router is not None and self.context is not None:
            raise UserError(
                f"{argument(ROUTING)} and {argument('ranks.context')} both divide a sample's "
                f"tokens; leave one of them out"
            )

    @cached_property
    def schedule(self) -> ACSchedule:
        """`policy`, parsed if it is a text."""
        return as_schedule(self.policy)

    def __call__(self, model: Stages, inputs: Any) -> Any:
        # of the process: another's training loop, or a benchmark, calls no command that does
        compute_fp32_in_fp32()
        blocks = model.blocks()
        devices = [device_of(block) for block in blocks]
        # Without a backward nothing is kept. A schedule may also name devices of the training that
        # this machine lacks.
        policies = (
            self.schedule.policies(devices)
            if torch.is_grad_enabled()
            else (Policy(),) * len(devices)
        )
        # A model casts explicitly. An autocast of the caller would change the dtype of its matmuls
        # without a word.
        autocast_off = autocast_disabled(next(iter(model.head.parameters())).device.type)
        with offloading(self.host, model, policies, devices) as stores, autocast_off:
            hops = DeviceHops(device_of(model.embed), self.clock)
            carry, exchange = self._embed(model, inputs), None
            # Only training skips blocks: a target that the base predicts, a validation and a sample
            # need the whole model.
            route = (
                self.router.route(carry)
                if self.router is not None and torch.is_grad_enabled()
                else None
            )
            if self.context is not None:
                carry, exchange = self.context.cut(carry)
            settings = BlockSettings(backend=self.backend, kernels=self.kernels, exchange=exchange)
            run = HookedRunner(
                (*timed(self.clock, self.hooks), *stores), EagerRunner(settings, self.clock)
            )
            for index, (block, policy, device) in enumerate(
                zip(blocks, policies, devices, strict=True)
            ):
                # Rebound at once: the carry on the device before would otherwise stay in memory
                # while the block runs.
                if route is None:
                    carry = hops.to(device, carry)
                else:
                    carry, route.unrouted = hops.to(device, (carry, route.unrouted))
                    carry = route.at(index, carry, has_parameters=device is not None)
                carry = self._run(index, block, carry, partial(run, policy=policy, device=device))
            if route is not None:
                carry = route.complete(carry)
            carry = hops.to(device_of(model.head), carry)
            if (calls := calls_in_force()) is not None:
                # After the last block, when every attention call of the step was counted.
                calls.check()
            if self.context is not None and exchange is not None:
                carry = self.context.gather(carry, exchange)
            return self._head(model, carry)

    # Methods of their own, so that `planner/profiler.py` can measure each stage.
    def _embed(self, model: Stages, inputs: Any) -> Any:
        return model.embed(inputs)

    def _head(self, model: Stages, carry: Any) -> Any:
        return model.head(carry)

    def _run(
        self, index: int, block: nn.Module, carry: Any, run: Callable[[int, nn.Module, Any], Any]
    ) -> Any:
        return run(index, block, carry)


class DeviceHops:
    """Sends the carry to the weights: once per boundary, and outside of every checkpoint, so that a
    recompute sends nothing again."""

    def __init__(self, here: torch.device | None, clock: StepClock):
        """Begin on the device where the embedding leaves the carry; `clock` times what devices do
        before and after it is sent."""
        self._here, self._clock = here, clock

    def to(self, device: torch.device | None, carry: Any) -> Any:
        """The carry on the device of the next stage. With None, for a stage without weights, the
        carry stays where it is."""
        if device is None or device == self._here:
            return carry
        before, self._here, clock = self._here, device, self._clock
        moved = move_carry(carry, device)
        if not clock.devices:
            return moved
        clock.mark(before, "waiting")
        clock.mark(device, "forward")
        # Its gradient leaves the device when the backward of all that follows is launched there.
        return call_before_backward((), moved, lambda: clock.mark(device, "waiting"))


def device_of(stage: nn.Module) -> torch.device | None:
    """The device of a stage's weights; None if it has none and runs wherever the carry is."""
    return next((parameter.device for parameter in stage.parameters()), None)


def move_carry(carry: Any, device: torch.device) -> Any:
    """A carry with all its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: sent_to(tensor, device), carry)
