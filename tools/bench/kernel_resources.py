"""What each Triton kernel takes of a GPU's multiprocessors, in the steps of Wan 14B and FLUX.2 dev.
No GPU and no weights are needed.

    # some minutes on one core
    uv run tools/bench/kernel_resources.py > benchmarks/kernel_resources.md

Steps run on fake tensors, as in plans, and every call of a kernel is noted. Triton then compiles
the kernels of these calls as it would when a GPU first launches them, with the properties that it
finds of their arguments, for six architectures.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.nn.kernels import hopper
from ditkit_core.nn.kernels.ops import IMPLEMENTATIONS
from ditkit_core.planner.memory_tracker import Meter
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import measure
from ditkit_core.planner.reduced_model import reduced_model
from ditkit_core.training.optim.optimizers import OptimConfig
from roofline import CASES, job_of


@dataclass(frozen=True, kw_only=True)
class Multiprocessor:
    """Limits of a multiprocessor, from the CUDA programming guide's table of compute
    capabilities."""

    name: str
    warps: int
    programs: int
    shared_bytes: int
    """Of which each program takes 1 KiB more than it asks for."""
    registers: int = 2**16

    def occupancy(self, found: "Resources") -> float:
        """Share of the warps that can be resident which programs of one kernel fill."""
        # Registers are handed out by 256 to a warp, to warps by four.
        per_warp = -(-found.registers * 32 // 256) * 256
        by_registers = self.registers // per_warp // 4 * 4 // found.warps
        by_shared = self.shared_bytes // (found.shared_bytes + 1024)
        return (
            min(self.programs, self.warps // found.warps, by_registers, by_shared)
            * found.warps
            / self.warps
        )


ARCHITECTURES = {
    80: Multiprocessor(name="A100", warps=64, programs=32, shared_bytes=164 * 1024),
    86: Multiprocessor(name="RTX 3090", warps=48, programs=16, shared_bytes=100 * 1024),
    89: Multiprocessor(name="RTX 4090", warps=48, programs=24, shared_bytes=100 * 1024),
    90: Multiprocessor(name="H200", warps=64, programs=32, shared_bytes=228 * 1024),
    100: Multiprocessor(name="B200", warps=64, programs=32, shared_bytes=228 * 1024),
    120: Multiprocessor(name="RTX 5090", warps=48, programs=24, shared_bytes=100 * 1024),
}
"""By compute capability."""
FP8_FROM = 89
HOPPER = 90


class Given(NamedTuple):
    """A tensor that an operation was called with, without its contents."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """A tensor like it without memory; its storage begins at an address that 16 divides, as
        torch's do."""
        return torch.empty(0, dtype=self.dtype, device="meta").as_strided(
            self.shape, self.stride, self.offset
        )


class Call(NamedTuple):
    """A call of one of our operations."""

    name: str
    positional: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel with its arguments and options."""

    kernel: Any
    grid: tuple[int, ...]
    positional: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def title(self) -> str:
        """File and function, with the constants that decide about sizes."""
        kernel = (
            f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__.strip('_')}"
        )
        constants = {
            name: value
            for name, value in self.named.items()
            if name.isupper() and name not in ("TINY", "OFFSET")
        }
        return f"{kernel} | {', '.join(f'{name} {value}' for name, value in constants.items())}"

    @property
    def has_fp8(self) -> bool:
        """Whether one of its tensors is in fp8, which Triton converts from Ada on."""
        return any(
            isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn for x in self.positional
        )


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a compiled kernel takes."""

    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread, in local memory."""
    shared_bytes: int
    warps: int
    widest_load: int
    """Bytes of a thread in one instruction."""
    widest_store: int


def jobs() -> Iterator[StepJob]:
    """Steps that call every kernel at the sizes of Wan 14B and FLUX.2 dev."""
    wan, flux2 = replace(CASES[0], size=(81, 720, 1280)), CASES[2]
    for case in (wan, flux2):
        plain = job_of(case, kernels="triton")
        yield plain
        yield from (job_of(case, kernels="triton", base=base) for base in ("int8", "fp8"))
        yield from (plain.with_execution(quantize=stored) for stored in ("int8", "nf4"))
        for rounding in ("split", "stochastic"):
            yield replace(
                plain, adapter=AdapterConfig(method="full"), optim=OptimConfig(rounding=rounding)
            )


@cache
def _calls(on_hopper: bool) -> Counter[Call]:
    return sum((calls_of(job, on_hopper=on_hopper) for job in jobs()), Counter[Call]())


def launches_on(capability: int) -> list[Launch]:
    """The kernels that the steps launch on GPUs of a compute capability; only for Hopper some are
    others."""
    on_hopper = capability == HOPPER
    with _pretending(on_hopper):
        return [launch for call in _calls(on_hopper) for launch in launches_of(call)]


@contextmanager
def _pretending(on_hopper: bool) -> Iterator[None]:
    with (
        patch.object(hopper, "is_hopper", lambda x: on_hopper),
        patch.object(hopper, "multiprocessors", lambda device: 132),
    ):
        yield


def calls_of(job: StepJob, *, on_hopper: bool = False) -> Counter[Call]:
    """The calls of our operations in a step, with their numbers."""
    found, dispatched = Counter[Call](), Meter.__torch_dispatch__

    def noted(self: Meter, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ditkit":
            positional, named = tree_map_only(Tensor, _given, (args, kwargs or {}))
            found[Call(func._opname, positional, tuple(named.items()))] += 1
        if func is torch.ops.aten._scaled_mm.out:
            # unknown to fake tensors: torch would multiply zeros of this size for minutes
            return kwargs["out"]
        return dispatched(self, func, types, args, kwargs)

    with patch.object(Meter, "__torch_dispatch__", noted), _pretending(on_hopper):
        model = reduced_model(job)
        measure(job, model, [0] * len(model.stages()), updates=job.adapter.method == "full")
    return found


def _given(x: Tensor) -> Given:
    return Given(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)


def launches_of(call: Call) -> list[Launch]:
    """The kernels that an operation launches."""
    found: list[Launch] = []

    def noted(kernel: Any, grid: tuple[int, ...]) -> Any:
        return lambda *given, **named: found.append(
            Launch(kernel=kernel, grid=grid, positional=given, named=named)
        )

    def made(x: Any) -> Any:
        return x.tensor() if isinstance(x, Given) else x

    with patch.object(JITFunction, "__getitem__", noted):
        IMPLEMENTATIONS[call.name](
            *map(made, call.positional), **{name: made(x) for name, x in call.named}
        )
    return found


class _Driver:
    """In place of a GPU's: says for what Triton compiles."""

    def __init__(self, capability: int):
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Inside the block Triton compiles for GPUs of this compute capability."""
    with patch.object(driver, "_active", _Driver(capability)):
        yield


def compiled(launch: Launch) -> Any:
    """The kernel as the launch would compile it, inside `compiling_for`; Triton keeps and returns
    the same for the same properties."""
    return launch.kernel.warmup(*launch.positional, grid=launch.grid, **launch.named)


def resources_of(code: Any) -> Resources:
    """What a compiled kernel takes, read off its binary, and off its PTX for the width of
    accesses."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    sizes = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", printed)
    assert sizes is not None, printed
    registers, stack, local = map(int, sizes.groups())
    load, store = (_widest(code.asm["ptx"], instruction) for instruction in ("ld", "st"))
    return Resources(
        registers=registers, spilled_bytes=stack + local, shared_bytes=code.metadata.shared,
        warps=code.metadata.num_warps,
        widest_load=load, widest_store=store,
    )  # fmt: skip


def _widest(ptx: str, instruction: str) -> int:
    found = re.findall(rf"\b{instruction}\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.[bfus](\d+)\b", ptx)
    widths = [int(parts or 1) * int(bits) // 8 for parts, bits in found]
    if instruction == "ld":  # also what a thread reads ahead into shared memory
        widths += [
            int(size, 16)
            for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global .*?, (0x[0-9a-f]+)", ptx)
        ]
    # Tiles come and go by sixteen bytes or more.
    between = {"ld": r"shared::\w+\.global", "st": r"global\.shared::\w+"}[instruction]
    widths += [16] * bool(re.search(rf"\bcp\.async\.bulk\.tensor\.\dd\.{between}\b", ptx))
    return max(widths)


def main() -> None:
    """Print the page."""
    rows: dict[str, dict[int, list[Resources]]] = {}
    for capability in ARCHITECTURES:
        seen: set[tuple[str, str]] = set()
        with compiling_for(capability):
            for launch in launches_on(capability):
                code = None if launch.has_fp8 and capability < FP8_FROM else compiled(launch)
                if code is not None and (key := (launch.title, code.hash)) not in seen:
                    seen.add(key)
                    rows.setdefault(launch.title, {}).setdefault(capability, []).append(
                        resources_of(code)
                    )
    print(_page(rows))


def _page(rows: Mapping[str, Mapping[int, Sequence[Resources]]]) -> str:
    names = [
        f"{limits.name} ({capability / 10:.1f})" for capability, limits in ARCHITECTURES.items()
    ]
    lines = [
        "# Resources of the Triton kernels",
        "",
        (
            f"Printed by `tools/bench/kernel_resources.py` with torch {torch.__version__} and Triton "
            f"{triton.__version__}: compiled, not run."
        ),
        "",
        (
            "The kernels of a LoRA's step, of quantized bases and of full fine-tunes in bf16, for Wan "
            "14B at 75,600 tokens and FLUX.2 dev at 1024x1024."
        ),
        (
            "For each GPU: registers of a thread, and the share of a multiprocessor's warps that the "
            "kernel's programs fill at once, as registers, shared"
        ),
        (
            "memory and the numbers of programs and warps allow; with spilled bytes of a thread, if "
            "there are any. Load and store: bytes of a thread in the"
        ),
        (
            "widest instruction. Where arguments of several kinds make several kernels, a row has the "
            "one with the most registers. On Hopper some kernels"
        ),
        "are others, or have other constants.",
        "",
        f"| kernel | constants | warps | shared bytes | load | store | {' | '.join(names)} |",
        f"|---|---|---|---|---|---|{'---|' * len(names)}",
    ]
    for title, by_capability in sorted(rows.items()):
        worst = {
            capability: max(found, key=lambda each: (each.spilled_bytes, each.registers))
            for capability, found in by_capability.items()
        }
        every = list(worst.values())
        cells = [
            str(max(each.warps for each in every)),
            f"{max(each.shared_bytes for each in every):,}",
        ]
        cells += [
            str(min(each.widest_load for each in every)),
            str(min(each.widest_store for each in every)),
        ]
        for capability, limits in ARCHITECTURES.items():
            cells.append(_cell(worst[capability], limits) if capability in worst else "-")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: Resources, limits: Multiprocessor) -> str:
    spilled = f", {found.spilled_bytes} B spilled" if found.spilled_bytes else ""
    return f"{found.registers}, {limits.occupancy(found):.0%}{spilled}"


if __name__ == "__main__":
    main()
