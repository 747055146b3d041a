"""How a model runs: on which devices, in which formats, and what it trades time for memory with.

An `Execution` says nothing about what is computed: of the same weights, batch and seed, most of its values change no bit of a result, and
the docstring of every other one says what it changes. A loader, a planner and an engine take it as one value; a run makes its own
(`run/context.py: RunContext.execution`).

    Execution(devices=("cuda:0", "cuda:1"), checkpointing="attn_only", quantize="fp8")
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ditkit_core.distributed.ranks import RanksConfig
from ditkit_core.engine.ac_schedule import ACSchedule, ScheduleLike, as_schedule
from ditkit_core.engine.token_routing import TokenRouting
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a model runs. The defaults are one device, exact weights in bf16, and activations that stay in memory."""

    devices: tuple[str, ...] = ("auto",)
    """Names of the devices that the model is split across, in order: `auto` (the first GPU, else the CPU), `cpu`, `cuda:1`, several GPUs, or
    `all` for all GPUs of this machine. The embedding is on the first, the head on the last, and each has at least one block."""
    split_points: tuple[int, ...] = ()
    """Blocks before which the next device begins, increasing, one fewer than devices. Empty: `planner/partition.py: placement_of` chooses them so that
    the fullest device is as empty as possible for its size."""
    reserve: tuple[float, ...] = ()
    """GiB of each GPU, in order, that are left to other programs; one number is for all. Split points and plans use the rest."""
    swap_blocks: tuple[int, ...] = ()
    """Number of streamed blocks on each device, whose weights stay in host memory and are prefetched (block swap); one number is for all."""
    checkpointing: ScheduleLike = "none"
    """Activation checkpointing: a policy (`none`, `attn_only`, `full`, `full+offload`, …), policies by blocks or devices (`full, 0-9=none`), or
    `budget`, which the planner resolves into policies."""
    attention: str = "sdpa"
    """Attention backend; `sdpa` lets torch choose the kernel. Another one changes the last bits."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of norms, rotations, gated units and roundings on a GPU: `torch` in several passes over memory, or `triton` in one. They differ
    in the last bits. An engine takes one of these two: `auto` is resolved before (`run/gpus.py: with_kernels`)."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Whether micro-batches are recorded as CUDA graphs and replayed; `auto` does so where the GPU waits for the host."""
    token_routing: str = ""
    """Blocks that a random share of the tokens skips in training, such as `2-25=0.5`; empty for none. Changes what is learned."""
    pipelined: bool = False
    """Whether all forwards of a step run before one backward, so that several devices work at the same time."""
    quantize: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Format in which the blocks' frozen matrices are stored; they are converted for each product. 8 or 4 bits round the weights."""
    compute: Literal["dtype", "int8", "fp8"] = "dtype"
    """Format in which these matrices are multiplied: `dtype` is `precision.matmul`; `int8` and `fp8` need the same `quantize`, and round
    inputs and gradients too."""
    precision: Precision = field(default_factory=Precision)
    """Dtype of each group of operations; `Precision(matmul=torch.float32)` computes all of them in fp32 or wider."""
    ranks: RanksConfig = field(default_factory=RanksConfig)
    """Of several processes: how many divide the weights (`shard`), and how many share the tokens of each sample (`context`)."""

    def __post_init__(self) -> None:
        if not self.devices:
            raise UserError("devices = () names no device; leave it out for the first GPU, or name one, such as cpu")

    @cached_property
    def schedule(self) -> ACSchedule:
        """`checkpointing`, parsed if it is a text."""
        return as_schedule(self.checkpointing)

    @cached_property
    def routing(self) -> TokenRouting | None:
        """`token_routing`, parsed."""
        return TokenRouting.parse(self.token_routing)

    @cached_property
    def torch_devices(self) -> "tuple[torch.device, ...]":
        """The devices of this machine that `devices` names; a GPU has an index.

        Raises:
            UserError: If this machine lacks one, or one is named twice.
        """
        from ditkit_core.engine.devices import choose_devices  # imports torch, which takes seconds

        return choose_devices(self.devices)

    @property
    def is_replayable(self) -> bool:
        """Whether micro-batches may be replayed as CUDA graphs, which hold neither pipelined steps nor exchanges between ranks."""
        is_eager = self.cuda_graphs == "off" or self.pipelined
        return not (is_eager or self.ranks.shard > 1 or self.ranks.context > 1)
