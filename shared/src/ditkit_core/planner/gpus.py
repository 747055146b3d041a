"""GPUs to plan for: their memory, and the published rates that the time of a step is estimated from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from ditkit_core.config.sizes import GIB, SIZE, per_device
from ditkit_core.errors import UserError
from ditkit_core.planner.memory import Budget

RESERVE_BYTES = 6 * GIB // 10
"""Memory of every GPU that tensors cannot use: the CUDA context with its libraries, and the driver's share."""
RESERVE_SHARE = 0.02
"""Share of a GPU that is left for gaps between the allocator's blocks."""

_EXAMPLES = "write 24GiB, 2x24GiB,1x16GiB, rtx4090 or 2xrtx3090,a100-80"
_ENTRY = re.compile(r"(?:(\d+)\s*[x*]\s*)?(\S.*)")
_MOST_GPUS = 8


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One device: its memory in bytes, rates in units per second."""

    name: str
    total: int
    """Bytes that the driver reports."""
    reserve: int
    """Bytes of them that a run cannot use."""
    bf16_flops: float
    """Dense matrix products in 16 bits with sums in fp32, without sparsity."""
    fp32_flops: float
    """Matrix products in fp32, not in TF32."""
    int8_flops: float
    """Matrix products of int8; 0 if its tensor cores have none."""
    fp8_flops: float
    """Those of fp8, with sums in fp32; 0 if its tensor cores have none."""
    memory_bandwidth: float
    """Bytes per second of its own memory."""
    host_bandwidth: float
    """Bytes per second of its PCIe link, in one direction."""
    source: str
    """Where the figures are from."""
    half: str = "bf16"
    """The 16-bit format of `bf16_flops`: `fp16` for GPUs older than Ampere, which compute no bf16."""

    @property
    def budget(self) -> Budget:
        """The memory to plan for."""
        return Budget(name=self.name, total=self.total, reserve=self.reserve)


def default_reserve(total: int) -> int:
    """Bytes that a plan leaves free on a GPU of `total` bytes."""
    return RESERVE_BYTES + int(total * RESERVE_SHARE)


_AMPERE = "NVIDIA Ampere GA102 whitepaper"
_ADA = "NVIDIA Ada whitepaper"
_TURING = "NVIDIA Turing whitepaper"
_VOLTA = "NVIDIA V100 datasheet, SXM2"
_BLACKWELL = "NVIDIA RTX Blackwell whitepaper"
_FP16_ONLY = (_TURING, _VOLTA, "NVIDIA T4 datasheet")
_H100 = "NVIDIA H100 datasheet, SXM", "NVIDIA H100 datasheet, PCIe"
_FP8 = (_ADA, _BLACKWELL, *_H100, "NVIDIA L40S datasheet", "NVIDIA H200 datasheet")
"""Sources of GPUs that multiply fp8."""
_PCIE = {"3x16": 15.75e9, "4x8": 15.75e9, "4x16": 31.5e9, "5x16": 63.0e9}

# name, other names, MiB as the driver reports them, TFLOP/s in bf16 (fp16 before Ampere) and in fp32, GB/s of memory, PCIe, source.
# GeForce GPUs multiply 16 bits with fp32 sums at half their fp16 rate; rates that are published "with sparsity" are halved here. The
# whitepapers give the rates of a generation per multiprocessor and clock; a GPU's own are its published boost clock times those.
# Products of int8 are published at 4 times that 16-bit rate for GeForce GPUs, and at twice for others; those of fp8 at twice for both.
_TABLE = (
    ("rtx2080ti", "2080ti", 11264, 53.8, 13.4, 616, "3x16", _TURING),
    ("t4", "", 15360, 65.0, 8.1, 320, "3x16", "NVIDIA T4 datasheet"),
    ("v100-16", "", 16384, 125.0, 15.7, 900, "3x16", _VOLTA),
    ("v100-32", "v100", 32768, 125.0, 15.7, 900, "3x16", _VOLTA),
    ("rtx3060", "3060", 12288, 25.5, 12.7, 360, "4x16", _AMPERE),
    ("rtx3080", "3080", 10240, 59.5, 29.8, 760, "4x16", _AMPERE),
    ("rtx3090", "3090", 24576, 71.0, 35.6, 936, "4x16", _AMPERE),
    ("rtx4060ti-16", "4060ti-16|4060ti|rtx4060ti", 16380, 44.1, 22.1, 288, "4x8", _ADA),
    ("rtx4070", "4070", 12282, 58.3, 29.1, 504, "4x16", _ADA),
    ("rtx4070s", "4070s|rtx4070super|4070super", 12282, 71.0, 35.5, 504, "4x16", _ADA),
    ("rtx4070ti", "4070ti", 12282, 80.2, 40.1, 504, "4x16", _ADA),
    ("rtx4070tis", "4070tis|rtx4070tisuper|4070tisuper", 16376, 88.2, 44.1, 672, "4x16", _ADA),
    ("rtx4080", "4080", 16376, 97.5, 48.7, 717, "4x16", _ADA),
    ("rtx4080s", "4080s|rtx4080super|4080super", 16376, 104.4, 52.2, 736, "4x16", _ADA),
    ("rtx4090", "4090", 24564, 165.2, 82.6, 1008, "4x16", _ADA),
    ("rtx5080", "5080", 16303, 112.6, 56.3, 960, "5x16", _BLACKWELL),
    ("rtx5090", "5090", 32607, 209.5, 104.8, 1792, "5x16", _BLACKWELL),
    ("a6000", "rtxa6000", 49140, 154.8, 38.7, 768, "4x16", "NVIDIA RTX A6000 datasheet"),
    ("l40s", "", 46068, 362.0, 91.6, 864, "4x16", "NVIDIA L40S datasheet"),
    ("a10", "", 23028, 125.0, 31.2, 600, "4x16", "NVIDIA A10 datasheet"),
    ("a100-40", "", 40960, 312.0, 19.5, 1555, "4x16", "NVIDIA A100 datasheet"),
    ("a100-80", "a100", 81920, 312.0, 19.5, 2039, "4x16", "NVIDIA A100 datasheet, SXM"),
    ("h100-80", "h100", 81559, 989.4, 66.9, 3350, "5x16", _H100[0]),
    ("h100pcie", "", 81559, 756.5, 51.0, 2000, "5x16", _H100[1]),
    ("h200-141", "h200", 143771, 989.4, 66.9, 4800, "5x16", "NVIDIA H200 datasheet"),
)


def _known_gpus() -> tuple[tuple[GPU, frozenset[str]], ...]:
    known = []
    for name, others, mebibytes, bf16, fp32, memory, link, source in _TABLE:
        total = mebibytes * 2**20
        gpu = GPU(
            name=name,
            total=total,
            reserve=default_reserve(total),
            bf16_flops=bf16 * 1e12,
            fp32_flops=fp32 * 1e12,
            int8_flops=0.0 if source == _VOLTA else bf16 * 1e12 * (4 if name.startswith("rtx") else 2),
            fp8_flops=bf16 * 1e12 * 2 if source in _FP8 else 0.0,
            memory_bandwidth=memory * 1e9,
            host_bandwidth=_PCIE[link],
            source=f"{source}; PCIe {link[0]} {link[1:]}",
            half="fp16" if source in _FP16_ONLY else "bf16",
        )
        known.append((gpu, frozenset(_plain(each) for each in (name, *others.split("|")) if each)))
    return tuple(known)


def _plain(name: str) -> str:
    """A GPU's name for comparison: letters and digits only, without the maker, and `80` for `80gb`."""
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(\d)\s*gi?b\b", r"\1", words))


KNOWN_GPUS = _known_gpus()
"""GPUs with their published rates, each with its names."""


def parse_gpus(text: str) -> tuple[GPU, ...]:
    """The GPUs that a text names, in order.

    A size in GB is read as GPUs are sold: 24GB is a GPU of 24 GiB. A size has no speed, so the rates are those of the slowest known GPU
    with as much memory.

    Args:
        text: Entries separated by commas, each a size (`24GiB`) or a known GPU (`rtx4090`), with `2x` before it for two.

    Raises:
        UserError: If an entry is neither.
    """
    gpus: list[GPU] = []
    for entry in text.lower().split(","):
        found = _ENTRY.fullmatch(entry.strip())
        if not found:
            raise UserError(f"--gpus {text!r} names no GPU before or after a comma; {_EXAMPLES}")
        count = int(found[1] or 1)
        gpu = next((gpu for gpu, names in KNOWN_GPUS if _plain(found[2]) in names), None)
        if size := SIZE.fullmatch(found[2]):
            gpu = of_size(int(float(size[1]) * GIB), f"{size[1]}GiB")
        if gpu is None:
            names = ", ".join(gpu.name for gpu, _ in KNOWN_GPUS)
            raise UserError(
                f"--gpus {text!r}: {entry.strip()!r} is neither a size nor one of the GPUs {names}; {_EXAMPLES}"
            )
        if not 1 <= count <= _MOST_GPUS - len(gpus):
            raise UserError(f"--gpus {text!r}: a plan can have 1 to {_MOST_GPUS} GPUs; {_EXAMPLES}")
        if gpu.reserve >= gpu.total:
            raise UserError(
                f"--gpus {text!r}: {entry.strip()!r} is less than CUDA itself uses, {gpu.reserve / GIB:.1f} GiB; {_EXAMPLES}"
            )
        gpus += [gpu] * count
    return tuple(gpus)


def of_size(total: int, name: str) -> GPU:
    """A GPU of which only the memory is known: it gets the rates of the slowest known one with as much memory, or of the largest.

    GPUs without bf16 are left out, since it is what runs compute in unless they say otherwise.
    """
    known = sorted((gpu for gpu, _ in KNOWN_GPUS if gpu.half == "bf16"), key=lambda gpu: gpu.total)
    # A driver reports a little less than the nominal size, hence the tolerance.
    as_large = [gpu for gpu in known if gpu.total * 1.1 >= total] or known[-1:]
    like = min(as_large, key=lambda gpu: gpu.bf16_flops)
    source = f"rates assumed as of {like.name}, the slowest known with as much memory ({like.source})"
    return replace(like, name=name, total=total, reserve=default_reserve(total), source=source)


def weakest(gpus: Sequence[GPU]) -> GPU:
    """A GPU with the least memory and the lowest rates of several, each of which does the same work."""
    names = dict.fromkeys(gpu.name for gpu in gpus)
    if len(names) == 1:
        return gpus[0]
    smallest, slowest = min(gpus, key=lambda gpu: gpu.budget.available), min(gpus, key=lambda gpu: gpu.bf16_flops)
    return replace(slowest, name=" and ".join(names), total=smallest.total, reserve=smallest.reserve)


def gpus_here(devices: Sequence[torch.device]) -> tuple[GPU, ...]:
    """The GPUs of these devices of this machine.

    Raises:
        UserError: If a device is no GPU.
    """
    gpus = []
    for device in devices:
        if device.type != "cuda":
            raise UserError(f"there is no GPU to plan for ({device}); name the GPUs to plan for: --gpus 24GiB")
        properties = torch.cuda.get_device_properties(device)
        gpus.append(gpu_named(properties.name, properties.total_memory))
    return tuple(gpus)


def keeping_reserves(gpus: Sequence[GPU], reserve_gib: Sequence[float]) -> tuple[GPU, ...]:
    """The GPUs without the memory that `train.reserve` leaves to other programs, in addition to each plan's own reserve.

    Args:
        gpus: The GPUs in order.
        reserve_gib: GiB for each, or one number for all, or none.

    Raises:
        UserError: If the number of reserves does not fit, or one leaves nothing.
    """
    reserves = per_device(reserve_gib, len(gpus), "train.reserve")
    kept = tuple(replace(gpu, reserve=gpu.reserve + int(gib * GIB)) for gpu, gib in zip(gpus, reserves, strict=True))
    for index, gpu in enumerate(kept):
        if gpu.reserve >= gpu.total:
            raise UserError(
                f"train.reserve = {list(reserve_gib)} leaves nothing of {gpu.name} (number {index}), which has "
                f"{gpu.total / GIB:.1f} GiB, of which CUDA uses {gpus[index].reserve / GIB:.1f}; lower it, or leave the device out"
            )
    return kept


_OTHER_PRODUCTS = {"ti", "super", "d", "laptop", "mobile", "max", "nvl"}
"""Words after a GPU's name that make it another one."""


def gpu_named(name: str, total: int) -> GPU:
    """The GPU that the driver calls `name`, with the memory that it reports; an unknown one gets rates by its size."""
    # Whole words, and none that makes another product of them: the A10G is no A10, a laptop's RTX 4090 no RTX 4090.
    words = re.findall(r"[a-z0-9]+", name.lower())
    written = {
        _plain(" ".join(words[begin:end]))
        for begin, end in combinations(range(len(words) + 1), 2)
        if not words[end:] or words[end] not in _OTHER_PRODUCTS
    }
    fitting = [gpu for gpu, names in KNOWN_GPUS if written & {*names, _plain(gpu.name.split("-")[0])}]
    # A different memory is another product, too.
    fitting = [gpu for gpu in fitting if abs(gpu.total - total) < total / 10]
    if not fitting:
        return of_size(total, name)
    known = max(fitting, key=lambda gpu: len(_plain(gpu.name)))
    return replace(known, name=name, total=total, reserve=default_reserve(total))
