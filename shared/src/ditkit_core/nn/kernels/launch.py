"""Sizes of tiles, the number of warps, and the choice of device: shared by all launches.

Every launch says by `enable_fp_fusion` whether a product and a sum may be rounded once: yes where results are compared within a tolerance, no
where they are bitwise those of torch. Triton 3.9 warns where a launch does not say it, because 3.10 has another default.
"""

import os
import shutil
from collections.abc import Collection
from importlib.util import find_spec

from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.nn.context import device_kind, settings_in_force

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on a CPU, under Triton's interpreter; for tests."""
HAS_TRITON = find_spec("triton") is not None


def why_not(devices: Collection[str]) -> str:
    """Why the kernels cannot run on devices of these types, as what follows the word triton; empty if nothing is known against it."""
    if INTERPRETED:
        return ""
    if others := [kind for kind in devices if kind != "cuda"]:
        return f"runs on GPUs only, and this run uses {others[0]}"
    if not HAS_TRITON:
        return "needs the package triton, which is not installed here"
    # Triton builds what launches a kernel with the compiler that CC names, and without CC with gcc or clang; it looks for no cc.
    named = os.environ.get("CC")
    if not any(map(shutil.which, ["gcc", "clang"] if named is None else [named])):
        return (
            f"needs a C compiler, and {'gcc and clang are' if named is None else f'CC = {named} is'} not installed here"
        )
    return ""


def check_kernels(name: str, devices: Collection[str]) -> None:
    """Refuse `train.kernels = "triton"` where something that it needs is missing, or a device of these types is no GPU.

    Raises:
        UserError: With what is missing.
    """
    if name == "triton" and devices and (reason := why_not(devices)):
        raise UserError(f"train.kernels = triton {reason}; set train.kernels = torch")


def kernels_in_force(x: Tensor) -> bool:
    """Whether the running block uses kernels on a tensor's device."""
    return kernels_on(settings_in_force().kernels, x)


def kernels_on(name: str, x: Tensor) -> bool:
    """Whether `train.kernels = name` means kernels on a tensor's device."""
    return name == "triton" and (device_kind(x) == "cuda" or INTERPRETED)


def summing_programs(rows: int, samples: int = 1) -> int:
    """Programs per sample of a kernel that sums over rows: each sums some rows, and torch adds their sums in a fixed order.

    Atomic additions would give other last bits each time. An H200 has 132 multiprocessors.
    """
    return min(rows, max(1, 1024 // max(1, samples)))


def tile(size: int) -> int:
    """The power of two that covers `size`: Triton's tiles have no other sizes."""
    return 1 << max(0, size - 1).bit_length()


def warps(elements: int, *, sums: bool = False) -> int:
    """Warps of a program with this many elements: at most 32 elements per thread, so that registers suffice.

    A program that also `sums` over its rows keeps those sums in registers, and gets half as many elements per thread. With 32 it needs 170 to
    218 registers, and a multiprocessor has room for one such program, 8 warps of 48 or 64 (`benchmarks/kernel_resources.md`).
    """
    return max(1, min(16, elements // (512 if sums else 1024)))
