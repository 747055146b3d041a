"""Seconds of kernels on a GPU, and of their launches on the host.

A kernel takes the time of its arithmetic or of its memory traffic, whichever is longer, and a
moment to start and to end. So a wide matmul runs at its share of the GPU's published rate, and a
narrow one, of few rows or of a LoRA's rank, at the rate of the memory. Shares and moments were
measured on one H100, the only GPU that has run this; other GPUs are assumed to reach the same
shares of their own published rates. `tools/bench/time_truth.py` compares what follows from these
two tables with the measurements that they are from.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from ditkit_core.planner.memory_tracker import Kernel, KernelCounts


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What a GPU publishes, in units per second."""

    bf16_flops: float
    """Dense matrix products in 16 bits with sums in fp32, without sparsity."""
    fp32_flops: float
    """Matrix products in fp32, not in TF32."""
    int8_flops: float
    """Matrix products of int8; 0 if its tensor cores have none."""
    fp8_flops: float
    """Matrix products of fp8, with sums in fp32; 0 if its tensor cores have none."""
    memory_bandwidth: float
    """Bytes per second of its own memory."""
    is_hopper: bool = False
    """Whether torch's own choice of an attention kernel is cuDNN's."""


class Reach(NamedTuple):
    """How close kernels of a kind come to a GPU's published rates."""

    arithmetic: float
    """Share of the rate of its arithmetic; 0 if it has none."""
    memory: float
    """Share of the rate of the GPU's memory."""
    start: float
    """Seconds that a kernel takes whatever its size."""


_MATMUL, _PASS = 3.25e-6, 1.5e-6
"""Seconds to start, fitted with the shares of all matmuls, and of all else."""
REACHED = {
    # 0.83 and 0.82 of the rate at 20,280 x 5,120 x 5,120; 0.51 to 0.70 of the memory's where the
    # sum has 192 terms. The start is fitted to the matmuls of eight profiled steps: klein 4B at
    # 512x512 under three policies, with either `train.kernels`, and 4 blocks of Wan 14B with
    # either. Within 7 % of each.
    "matmul_16": Reach(0.82, 0.65, _MATMUL),
    # The fp32 matmuls of the same steps are small: the share was not measured.
    "matmul_32": Reach(0.67, 0.65, _MATMUL),
    # `_int_mm` 0.43 to 0.47 at four sizes from 4,608 rows, and 0.35 at 1,536; `_scaled_mm` with
    # results in fp32 0.68 to 0.71 and 0.62.
    "matmul_int8": Reach(0.45, 0.65, _MATMUL),
    "matmul_fp8": Reach(0.69, 0.65, _MATMUL),
    # The same products, with the pass for their scales, where they are no kernel of our own:
    # `ON_HOPPER`.
    "matmul_int8_scaled": Reach(0.45, 0.65, _MATMUL),
    "matmul_fp8_scaled": Reach(0.69, 0.65, _MATMUL),
    "scales": Reach(0.0, 0.8, _PASS),
    # cuDNN's kernels, which `sdpa` takes there: 588 and 516 to 527 TFLOP/s at 20,280 tokens, 453
    # and 403 at 1,536.
    "attention": Reach(0.59, 0.9, 15e-6),
    "attention_backward": Reach(0.525, 0.9, 43e-6),
    # Not measured: other kernels, on the units of fp32.
    "attention_32": Reach(0.59, 0.9, 15e-6),
    "attention_backward_32": Reach(0.525, 0.9, 43e-6),
    # Fitted to the same eight steps, of 23 to 317 GB in 620 to 6,700 operations. By themselves
    # kernels of `nn/kernels` reach 2,400 to 2,990 GB/s.
    "elementwise": Reach(0.0, 0.69, _PASS),
    "fused": Reach(0.0, 0.8, _PASS),
    # 2,650 to 2,890 GB/s of int8, 2,560 to 2,785 of nf4.
    "conversion": Reach(0.0, 0.8, _PASS),
    # Waits for its link, not for the GPU (`step_time.py`).
    "transfer": Reach(0.0, 0.0, 0.0),
}
"""By `Kernel.kind`, what an H100 SXM reached with torch 2.11, CUDA 13.0 and cuDNN 9.19: commits
fd759269, and 08d556ef for single kernels."""

ON_HOPPER = {
    # 0.62, 0.65, 0.63, 0.60 and 0.48 of the rate in int8, and 0.64, 0.62, 0.62, 0.69 and 0.61 in
    # fp8, at 20,280 x 5,120 x 5,120 to 1,536 x 9,216 x 3,072.
    "matmul_int8_scaled": Reach(0.63, 0.65, _MATMUL),
    "matmul_fp8_scaled": Reach(0.63, 0.65, _MATMUL),
    "scales": Reach(0.0, 0.0, 0.0),
}
"""What it reached with the kernels that other GPUs have not: products that apply the scales of
their codes too."""
FLASH = {"attention": 0.353, "attention_backward": 0.317}
"""Shares of FlashAttention 2's kernels on Hopper, where cuDNN's are faster: 349 and 314 TFLOP/s at
20,288 tokens."""

LAUNCHED = {"matmul": 130e-6, "fused": 170e-6, "other": 32e-6}
"""Seconds of the host for an operation, with the Python around it, by what it launches: a matmul or
attention, a kernel of `nn/kernels`, all else. Fitted to ten steps of klein 4B and FLUX.2 dev on
three machines with an H100 (commits fd759269 to 08d556ef). Their hosts were slow, and up to 1.8
times as slow in one minute as in another: a call to `mm` alone took 52 to 100 µs. Other hosts take
less."""


_LAUNCHED_AS = {
    "matmul": "matmul",
    "attention": "matmul",
    "fused": "fused",
    "conversion": "fused",
    "scales": "fused",
}


def rate_of_codes(gpu: Rates, compute: str) -> float:
    """A GPU's published rate of products of `int8` or `fp8` codes; 0 if it has none."""
    return {"int8": gpu.int8_flops, "fp8": gpu.fp8_flops}.get(compute, 0.0)


def reach_of(kind: str, gpu: Rates) -> Reach:
    """How close kernels of a kind come to a GPU's published rates."""
    return (gpu.is_hopper and ON_HOPPER.get(kind)) or REACHED[kind]


def kernel_seconds(kernel: Kernel, gpu: Rates, attention: str = "sdpa") -> float:
    """Seconds of one kernel on a GPU. `train.attention` matters on Hopper alone: on all other GPUs
    torch's own choice is FlashAttention 2 anyway."""
    arithmetic, memory, start = reach_of(kernel.kind, gpu)
    if not memory:
        return 0.0
    if gpu.is_hopper and attention in ("flash", "sdpa_flash"):
        arithmetic = FLASH.get(kernel.kind, arithmetic)
    rate = gpu.fp32_flops if kernel.kind.endswith("_32") else gpu.bf16_flops
    rate = rate_of_codes(gpu, kernel.kind.removeprefix("matmul_").removesuffix("_scaled")) or rate
    of_flops = kernel.flops / (arithmetic * rate) if kernel.flops else 0.0
    return start + max(of_flops, kernel.bytes / (memory * gpu.memory_bandwidth))


@cache
def gpu_seconds(kernels: KernelCounts, gpu: Rates, attention: str = "sdpa") -> float:
    """Seconds that a GPU is busy with kernels, one after the other."""
    # A set has another order in each process; `fsum` gives the same sum in every order.
    return math.fsum(count * kernel_seconds(kernel, gpu, attention) for kernel, count in kernels)


@cache
def host_seconds(kernels: KernelCounts) -> float:
    """Seconds that the host takes to launch them, operation by operation."""
    kinds = [(kernel.kind.partition("_")[0], count) for kernel, count in kernels]
    return math.fsum(count * LAUNCHED[_LAUNCHED_AS.get(kind, "other")] for kind, count in kinds)


def is_launched_slowly(
    every: Collection[KernelCounts], gpu: Rates, attention: str = "sdpa"
) -> bool:
    """Whether the host takes longer to launch kernels than a GPU to run them."""
    return sum(map(host_seconds, every)) > sum(
        gpu_seconds(counts, gpu, attention) for counts in every
    )
