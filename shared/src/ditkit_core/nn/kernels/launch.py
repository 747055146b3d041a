"""Launches, sizes of tiles, the number of warps, and the choice of device: shared by all kernels.

Every launch says by `enable_fp_fusion` whether a product and a sum may be rounded once: yes where
results are compared within a tolerance, no where they are bitwise torch's results. Triton 3.9 warns
where a launch does not say it, because 3.10 has another default.
"""

import os
import shutil
from collections.abc import Callable, Collection
from functools import reduce
from importlib.util import find_spec
from inspect import signature
from operator import attrgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.nn.context import device_current, device_kind, settings_in_force

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on a CPU, under Triton's interpreter; for tests."""
HAS_TRITON = find_spec("triton") is not None


def why_not(devices: Collection[str]) -> str:
    """Why the kernels cannot run on devices of these types, as what follows the word triton; empty
    if nothing is known against it."""
    if INTERPRETED:
        return ""
    if others := [kind for kind in devices if kind != "cuda"]:
        return f"runs on GPUs only, and this run uses {others[0]}"
    if not HAS_TRITON:
        return "needs the package triton, which is not installed here"
    # Triton builds what launches a kernel with the compiler that CC names, and without CC with gcc
    # or clang; it looks for no cc.
    named = os.environ.get("CC")
    if not any(map(shutil.which, ["gcc", "clang"] if named is None else [named])):
        return f"needs a C compiler, and {'gcc and clang are' if named is None else f'CC = {named} is'} not installed here"
    return ""


def check_kernels(name: str, devices: Collection[str]) -> None:
    """Refuse `train.kernels = "triton"` where something that it needs is missing, or a device of
    these types is no GPU."""
    if name == "triton" and devices and (reason := why_not(devices)):
        raise UserError(f"train.kernels = triton {reason}; set train.kernels = torch")


def kernels_in_force(x: Tensor) -> bool:
    """Whether the running block uses kernels on a tensor's device."""
    return kernels_on(settings_in_force().kernels, x)


def kernels_on(name: str, x: Tensor) -> bool:
    """Whether `train.kernels = name` means kernels on a tensor's device."""
    return name == "triton" and (device_kind(x) == "cuda" or INTERPRETED)


_MOST_KEPT = 4096
"""Entries of a launcher at which it forgets all: sizes of buckets and texts that a run does not
repeat would fill the host's memory."""
_FIRST_TRITON, _LAST_TRITON = (3, 4), (3, 9)
"""Versions whose way of starting a compiled kernel was read and is the same; with others, Triton
launches everything by itself."""
_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")


class _Compiled(NamedTuple):
    """A compiled kernel and what starts it."""

    run: Callable[..., None]
    function: int
    metadata: Any
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    code: Any
    """Unloads the function when nobody refers to it any longer."""


def _compiled(code: Any) -> _Compiled | None:
    """A kernel that Triton has launched; None where it runs in the interpreter, on AMD, where
    Triton also compiles for the sizes of tensors' memory, and under a Triton that starts kernels in
    another way."""
    if code is None or torch.version.hip is not None:
        return None
    import triton

    try:
        if not _FIRST_TRITON <= tuple(map(int, triton.__version__.split(".")[:2])) <= _LAST_TRITON:
            return None
        driver = triton.runtime.driver.active
        return _Compiled(
            code.run,
            code.function,
            code.packed_metadata,
            driver.get_current_device,
            driver.get_current_stream,
            code,
        )
    except (AttributeError, ValueError):
        return None


class Launcher:
    """A kernel of Triton with a launch that takes the host a third of the time of Triton's own
    (`benchmarks/host_time.md`).

    Triton inspects all arguments of every launch, to find the kernel that it compiled for what they
    have in common: their types, whether 16 divides an address or a number, whether a number is 1.
    Here a kernel is found by the arguments themselves: by all numbers and constants, by the
    tensors' dtypes and device, if 16 divides all addresses. What is launched for the first time
    goes through Triton, and so does what has another address or is not on the current device. A
    launch reads nothing back and allocates nothing, so that a CUDA graph can capture it. Triton's
    hooks around launches, for its profiler Proton, see no launch but those that go through it. The
    check of a run (`nn/kernel_check.py`) makes each launch both ways, so that kernels which would
    be started wrongly are not used.
    """

    def __init__(self, kernel: Any, *, enable_fp_fusion: bool):
        """Wrap a kernel, whose parameters are tensors, numbers and constants, in this order.

        Args:
            kernel: A function under `triton.jit`.
            enable_fp_fusion: Whether a product and a sum may be rounded once.
        """
        self.kernel, self._fusion = kernel, enable_fp_fusion
        self._parameters = tuple(signature(kernel.fn).parameters)
        self._kept: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...] = (),
        constants: tuple[float, ...] = (),
        num_warps: int = 4,
    ) -> None:
        """Launch the kernel on the current stream of the tensors' device.

        Args:
            grid: Numbers of programs along three axes.
            tensors: On one device. In place of one that is not read there may be any other.
            numbers: Strides, counts and scalars, each of one type in all launches.
            constants: Values of the kernel's constants, each of one type in all launches.
            num_warps: Of a program.
        """
        device = tensors[0].get_device()
        key = (device, num_warps, numbers, constants, *map(_dtype, tensors))
        addresses = tuple(map(Tensor.data_ptr, tensors))
        is_aligned = not reduce(or_, addresses) % 16
        compiled = self._kept.get(key)
        if compiled is not None and is_aligned and compiled.current_device() == device:
            run, function, metadata, _, current_stream, _ = compiled
            run(
                *grid,
                current_stream(device),
                function,
                metadata,
                None,
                None,
                None,
                *addresses,
                *numbers,
                *constants,
            )
            return
        named = dict(zip(self._parameters[len(tensors) + len(numbers) :], constants, strict=True))
        with device_current(tensors[0]):
            code = self.kernel[grid](
                *tensors, *numbers, **named, num_warps=num_warps, enable_fp_fusion=self._fusion
            )
        if is_aligned and (compiled := _compiled(code)) is not None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = compiled


def launcher(*, enable_fp_fusion: bool) -> Callable[[Any], Launcher]:
    """`Launcher` as a decorator above `triton.jit`."""
    return lambda kernel: Launcher(kernel, enable_fp_fusion=enable_fp_fusion)


def blocks_of(count: int, size: int) -> int:
    """The number of blocks of `size` that cover `count`. `triton.cdiv` takes the host ten times as
    long."""
    return -(-count // size)


def summing_programs(rows: int, samples: int = 1) -> int:
    """Programs per sample of a kernel that sums over rows: each sums some rows, and torch adds
    their sums in a fixed order.

    Atomic additions would give other last bits each time. An H200 has 132 multiprocessors.
    """
    return min(rows, max(1, 1024 // max(1, samples)))


def tile(size: int) -> int:
    """The power of two that covers `size`: Triton's tiles have no other sizes."""
    return 1 << max(0, size - 1).bit_length()


def warps(elements: int, *, sums: bool = False) -> int:
    """Warps of a program with this many elements: at most 32 elements per thread, so that registers
    suffice.

    A program that also `sums` over its rows keeps those sums in registers, and gets half as many
    elements per thread. With 32 it needs 170 to 218 registers, and a multiprocessor has room for
    one such program, 8 warps of 48 or 64 (`benchmarks/kernel_resources.md`).
    """
    return max(1, min(16, elements // (512 if sums else 1024)))
