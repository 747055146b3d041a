"""How a model runs: on which devices, in which formats, and what it trades time for memory with.

An `Execution` says nothing about what is computed: of the same weights, batch and seed, most of its
values change no bit of a result, and the docstring of every other one says what it changes. A
loader, a planner and an engine take it as one value.

    Execution(devices=("cuda:0", "cuda:1"), checkpointing="attn_only", quantize="fp8")

Its settings are declared here and nowhere else: `[train]` and `[base]` of a run file begin with
`StepExecution` and `BaseExecution`, a run puts the two together (`RunContext.execution`), and a
search varies the value. So a new setting is a field here, and what it does.
"""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from ditkit_core.config.field import setting
from ditkit_core.distributed.ranks import RanksConfig
from ditkit_core.engine.ac_schedule import ACSchedule, ScheduleLike, as_schedule, check_sizes
from ditkit_core.engine.token_routing import TokenRouting
from ditkit_core.errors import UserError, argument
from ditkit_core.models.precision import Precision

if TYPE_CHECKING:
    import torch

Section = TypeVar("Section", bound=Any)


@dataclass(frozen=True, kw_only=True)
class BaseExecution:
    """Formats of the frozen weights: keys of `[base]`."""

    quantize: Literal["none", "int8", "fp8", "nf4"] = setting(
        "none", resume="stated", after="assistant_low"
    )
    """Format in which the blocks' frozen matrices are stored, to save memory: 8 or 4 bits,
    converted to model.dtype for each product."""
    compute: Literal["dtype", "int8", "fp8"] = setting("dtype", resume="stated")
    """Format in which the blocks' frozen matrices are multiplied: `dtype` is model.dtype. `int8`
    and `fp8` need the same `quantize`, or a file in that format: inputs and gradients are rounded
    to 8 bits too, which is faster on a GPU (fp8 from Ada on) and less accurate."""


@dataclass(frozen=True, kw_only=True)
class StepExecution:
    """Devices, memory and kernels of a step: keys of `[train]`."""

    device: str = setting("auto", resume="free", after="profile")
    """Where to train: `auto` (the first GPU, else the CPU), `cpu`, `cuda:1`."""
    devices: tuple[str, ...] = setting((), resume="free")
    """Devices to split the model across, in order, instead of `device`: `["cuda:0", "cuda:1"]`, or
    `["all"]` for all GPUs of this machine. The embedding is on the first, the head on the last.
    Each gets at least one block; omit a device to leave it unused."""
    split_points: tuple[int, ...] = setting((), resume="free", formerly=("cuts",))
    """Blocks before which the next device begins. Empty chooses them so that the fullest device is
    as empty as possible for its size."""
    reserve: tuple[float, ...] = setting((), resume="free")
    """GiB of each GPU, in order, that are left to other programs (a desktop, for example); one
    number is for all GPUs. Split points and plans use the rest."""
    swap_blocks: tuple[int, ...] = setting((), resume="free")
    """Number of streamed blocks on each device, whose weights stay in host memory and are
    prefetched (block swap). One number is for all devices. Results are bitwise identical. A full
    fine-tune needs optim.fused_backward; it also keeps the optimizer state of these blocks on the
    host, and with accumulation the sums of their gradients."""
    pipelined: bool = setting(False, resume="stated")
    """Run the forwards of all micro-batches of a step, then one backward, so that the devices of a
    split model work at the same time. Needs accumulation of at least 2, and memory for the
    activations of all micro-batches."""
    checkpointing: ScheduleLike = setting("none", resume="free", after="threads", written=str)
    """Activation checkpointing, which saves memory and takes time: what the backward recomputes
    instead of keeping. `none`, `attn_only`, `full`, `full+offload`, `budget` and others, for all
    blocks, or by blocks or devices: `full, 0-9=none`. Results are bitwise identical."""
    attention: str = setting("sdpa", resume="stated")
    """Attention backend; `--help train` has a table of them. `sdpa` lets torch choose the
    kernel."""
    kernels: Literal["auto", "torch", "triton"] = setting(
        "auto", resume="stated", asked_again=("triton",)
    )
    """Implementation of norms, rotations and gated units on a GPU, of splitting LoRA factors, of
    converting int8 and nf4 weights, of rounding for base.compute, and of writing updates into bf16
    weights: `torch` in several passes over memory, or `triton` in one. Both compute in fp32 and
    differ in the last bits. `auto` is `triton` on GPUs where a check of each kernel against torch
    succeeds as the run starts, and else `torch`; a run stores which."""
    cuda_graphs: Literal["auto", "on", "off"] = setting("auto", resume="free")
    """Record forward, loss and backward of each kind of micro-batch as a CUDA graph, and replay it:
    the host then launches them at once. `auto` does so where the GPU waits for the host, which is
    with few tokens; `on` for every kind. Results are bitwise identical. What cannot be replayed
    runs eagerly, and a line says why."""
    token_routing: str = setting("", resume="stated")
    """Blocks that a random share of each sample's tokens skips in training, such as `2-25=0.5`:
    half of the tokens skip the blocks 2 to 25, and join the others again behind them. The step
    needs less time and memory, and sees less of each sample. Empty routes none."""

    def __post_init__(self) -> None:
        """Raise UserError for values that are none on any machine."""
        TokenRouting.parse(self.token_routing)
        check_sizes(self.schedule.budget or ())
        if not all(0 <= reserve < math.inf for reserve in self.reserve):
            raise UserError(
                f"{argument('train.reserve')} = {list(self.reserve)} must be GiB of at least 0"
            )

    @cached_property
    def schedule(self) -> ACSchedule:
        """`checkpointing`, parsed once if it is a text."""
        return as_schedule(self.checkpointing)

    @cached_property
    def routing(self) -> TokenRouting | None:
        """`token_routing`, parsed."""
        return TokenRouting.parse(self.token_routing)

    @property
    def device_names(self) -> tuple[str, ...]:
        """The names in `devices`, or else the one in `device`."""
        return self.devices or (self.device,)

    @cached_property
    def torch_devices(self) -> "tuple[torch.device, ...]":
        """The devices of this machine that these names mean; a GPU has an index.

        Raises:
            UserError: If this machine lacks one, one is named twice, or `device` and `devices` are
                both set.
        """
        # imports torch, which takes seconds
        from ditkit_core.engine.devices import choose_device, choose_devices

        self.check_devices()
        return (
            choose_devices(self.devices)
            if self.devices
            else (choose_device(self.device, argument("train.device")),)
        )

    def check_devices(self) -> None:
        """Refuse a `device` next to `devices`. Not where a section is made: a command may need no
        device."""
        if self.devices and self.device != "auto":
            raise UserError(
                f"{argument('train.device')} = {self.device!r} and {argument('train.devices')} are "
                "both set; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class Execution(StepExecution, BaseExecution):
    """How a model runs. The defaults are one device, exact weights in bf16, and activations that
    stay in memory."""

    precision: Precision = field(default_factory=Precision)
    """Dtype of each group of operations; `Precision(matmul=torch.float32)` computes all of them in
    fp32 or wider."""
    ranks: RanksConfig = field(default_factory=RanksConfig)
    """Of several processes: how many divide the weights (`shard`), and how many share the tokens of
    each sample (`context`)."""

    def __post_init__(self) -> None:
        """Raise UserError for values that are none on any machine."""
        super().__post_init__()
        self.check_devices()

    @classmethod
    def of(cls, *sections: Any, precision: Precision, ranks: RanksConfig) -> Self:
        """The settings in these sections of a configuration, which have others, too."""
        settings = {
            name: getattr(section, name) for section in sections for name in _settings_in(section)
        }
        return cls(**settings, precision=precision, ranks=ranks)

    def within(self, section: Section) -> Section:
        """A section of a configuration with its part of these settings."""
        return replace(section, **{name: getattr(self, name) for name in _settings_in(section)})

    @property
    def allows_cuda_graphs(self) -> bool:
        """Whether micro-batches may be replayed as CUDA graphs, which hold neither pipelined steps
        nor exchanges between ranks."""
        is_eager = self.cuda_graphs == "off" or self.pipelined
        return not (is_eager or self.ranks.shard > 1 or self.ranks.context > 1)


def _settings_in(section: Any) -> set[str]:
    return {setting.name for setting in fields(section)} & {
        setting.name for setting in fields(Execution)
    }
