"""GPUs to plan for: their memory, and the published rates that the time of a step is estimated
from."""

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import torch

from ditkit_core.config.nearest import nearest_word
from ditkit_core.config.sizes import GIB, SIZE, per_device
from ditkit_core.errors import UserError
from ditkit_core.planner.kernel_time import Rates
from ditkit_core.planner.memory import Budget

_PUBLISHED = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
SOLD_GB: dict[str, float] = {
    name: float(size) for size, names in _PUBLISHED["sold"].items() for name in names.split()
}
"""From a GPU's name to the size in GB to plan with."""

RATES_OF = dict.fromkeys(("gb10", "dgxspark"), "rtx4060ti-16")
"""GPUs with far more memory than others of their speed, and the known GPU whose rates a plan
assumes."""

_NOT_NVIDIA = re.compile(
    r"(radeon|rx|mi|vega|gfx|arc|gaudi|tpu)[a-z]?\s*\d|apple|m[1-9]\s*(pro|max|ultra)?$|mps$|amd|intel"
)


def unknown_gpu(name: str, names: Iterable[str]) -> str:
    """What to do about a GPU that is not known, by its name in lower case, as the end of a
    sentence. `names` are GPUs with rates."""
    if _NOT_NVIDIA.match(name):
        return "is no GPU of NVIDIA, and ditkit trains on those alone, and slowly on CPUs"
    # Another number is another product: a 3070 is not a mistyped 4070.
    number = re.search(r"\d+", name)
    similar = [
        other for other in (*names, *SOLD_GB) if number and number[0] in re.findall(r"\d+", other)
    ]
    near = nearest_word(name, similar, 0.6)
    return f"is not known; {f'did you mean {near}? Or ' if near else ''}write its memory, as in 2x24GiB,1x16GiB"


RESERVE_BYTES = 6 * GIB // 10
"""Memory of every GPU that tensors cannot use: the CUDA context with its libraries. What the driver
keeps for itself is no part of `total`."""
RESERVE_SHARE = 0.02
"""Share of a GPU that is left for gaps between the allocator's blocks."""
DRIVER_BYTES = GIB // 2
"""Memory of a GPU that the driver keeps for itself, so that torch does not see it: this and
`DRIVER_SHARE`. Of the known GPUs with 10 GB and more, only those with ECC in GDDR lack more."""
DRIVER_SHARE = 0.005
"""Share of a GPU that the driver keeps for itself too."""

_EXAMPLES = "write 24GiB, 2x24GiB,1x16GiB, rtx4090 or 2xrtx3090,a100-80"
_ENTRY = re.compile(r"(?:(\d{1,9})\s*[x*]\s*)?(\S.*)")
_MOST_GPUS = 8


@dataclass(frozen=True, kw_only=True)
class GPU(Rates):
    """One device: its memory in bytes, rates in units per second."""

    name: str
    total: int
    """Bytes that torch reports. `nvidia-smi` reports 0.3 to 0.9 GiB more, which no process can
    use."""
    reserve: int
    """Bytes of them that a run cannot use."""
    host_bandwidth: float
    """Bytes per second of its PCIe link, in one direction."""
    source: str
    """Where the figures are from."""
    half: str = "bf16"
    """The 16-bit format of `bf16_flops`: `fp16` for GPUs older than Ampere, which compute no
    bf16."""

    @property
    def budget(self) -> Budget:
        """The memory to plan for."""
        return Budget(name=self.name, total=self.total, reserve=self.reserve, rates=self)


def default_reserve(total: int) -> int:
    """Bytes that a plan leaves free on a GPU of `total` bytes."""
    return RESERVE_BYTES + int(total * RESERVE_SHARE)


_PCIE = {"3x16": 15.75e9, "4x8": 15.75e9, "4x16": 31.5e9, "5x16": 63.0e9}


def _known_gpus() -> tuple[tuple[GPU, frozenset[str]], ...]:
    gpus = []
    for name, others, memory, bf16, fp32, bandwidth, link, generation, source in _PUBLISHED[
        "known"
    ]["gpus"]:
        total = int(memory * GIB)
        gpu = GPU(
            name=name,
            total=total,
            reserve=default_reserve(total),
            bf16_flops=bf16 * 1e12,
            fp32_flops=fp32 * 1e12,
            int8_flops=0.0
            if generation == "volta"
            else bf16 * 1e12 * (4 if name.startswith("rtx") else 2),
            fp8_flops=bf16 * 1e12 * 2 if generation in ("ada", "blackwell", "hopper") else 0.0,
            memory_bandwidth=bandwidth * 1e9,
            host_bandwidth=_PCIE[link],
            source=f"{source}; PCIe {link[0]} {link[1:]}",
            half="fp16" if generation in ("volta", "turing") else "bf16",
            is_hopper=generation == "hopper",
        )
        gpus.append(
            (gpu, frozenset(_plain(alias) for alias in (name, *others.split("|")) if alias))
        )
    return tuple(gpus)


def _plain(name: str) -> str:
    """A GPU's name for comparison: letters and digits only, without the maker, and `80` for
    `80gb`."""
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(\d)\s*gi?b\b", r"\1", words))


KNOWN_GPUS = _known_gpus()
"""GPUs with their published rates, each with its names."""


def parse_gpus(text: str) -> tuple[GPU, ...]:
    """The GPUs that a text names, in order.

    A size is read as GPUs are sold: 24GB or 24GiB is a GPU of 24 GiB, and torch reports less
    (`as_sold`). A size has no speed, so the rates are as on the slowest known GPU with as much
    memory.

    Args:
        text: Entries separated by commas, each a size (`24GiB`) or a known GPU (`rtx4090`), with
            `2x` before it for two.
    """
    gpus: list[GPU] = []
    for entry in text.lower().split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if not match:
            raise UserError(f"--gpus {text!r} names no GPU before or after a comma; {_EXAMPLES}")
        count = int(match[1] or 1)
        gpu = _gpu_called(match[2])
        if gpu is None:
            remedy = unknown_gpu(match[2], (gpu.name for gpu, _ in KNOWN_GPUS))
            raise UserError(f"--gpus {text!r}: {entry.strip()!r} {remedy}")
        if not 1 <= count <= _MOST_GPUS - len(gpus):
            raise UserError(f"--gpus {text!r}: a plan can have 1 to {_MOST_GPUS} GPUs; {_EXAMPLES}")
        if gpu.reserve >= gpu.total:
            used = (DRIVER_BYTES + RESERVE_BYTES) / GIB
            raise UserError(
                f"--gpus {text!r}: {entry.strip()!r} is less than the driver and CUDA use, "
                f"{used:.1f} GiB; {_EXAMPLES}"
            )
        gpus += [gpu] * count
    return tuple(gpus)


def _gpu_called(name: str) -> GPU | None:
    """The GPU of a name or a size; None if it is neither."""
    if size := SIZE.fullmatch(name):
        return as_sold(float(size[1]))
    plain = _plain(name)
    if gpu := next((gpu for gpu, names in KNOWN_GPUS if plain in names), None):
        return gpu
    for sold, gigabytes in SOLD_GB.items():
        if plain in (_plain(sold), _plain(sold).removeprefix("rtx")):
            gpu = replace(as_sold(gigabytes), name=sold)
            return gpu if sold not in RATES_OF else _with_rates_of(gpu, RATES_OF[sold])
    return None


def _with_rates_of(gpu: GPU, reference: str) -> GPU:
    """A GPU with the rates of a known one."""
    like = next(known_gpu for known_gpu, _ in KNOWN_GPUS if known_gpu.name == reference)
    source = f"rates assumed as of {reference} ({like.source})"
    return replace(like, name=gpu.name, total=gpu.total, reserve=gpu.reserve, source=source)


def as_sold(size: float) -> GPU:
    """A GPU that is sold with `size` GiB (GB in advertisements); torch reports what the driver
    leaves."""
    return of_size(int(size * GIB * (1 - DRIVER_SHARE)) - DRIVER_BYTES, f"{size:g}GiB")


def of_size(total: int, name: str) -> GPU:
    """A GPU with `total` bytes as torch reports them, and nothing else is known: it gets the rates
    of the slowest known one with as much memory, or of the largest.

    GPUs without bf16 are left out, since it is what runs compute in unless they say otherwise.
    """
    with_bf16 = sorted(
        (gpu for gpu, _ in KNOWN_GPUS if gpu.half == "bf16"), key=lambda gpu: gpu.total
    )
    # GPUs that are sold with one size differ in what torch reports, most of all those with ECC,
    # hence the tolerance.
    as_large = [gpu for gpu in with_bf16 if gpu.total * 1.1 >= total] or with_bf16[-1:]
    like = min(as_large, key=lambda gpu: gpu.bf16_flops)
    source = (
        f"rates assumed as of {like.name}, the slowest known with as much memory ({like.source})"
    )
    return replace(like, name=name, total=total, reserve=default_reserve(total), source=source)


def weakest(gpus: Sequence[GPU]) -> GPU:
    """A GPU with the least memory and the lowest rates of several that do the same work."""
    names = dict.fromkeys(gpu.name for gpu in gpus)
    if len(names) == 1:
        return gpus[0]
    smallest, slowest = (
        min(gpus, key=lambda gpu: gpu.budget.available),
        min(gpus, key=lambda gpu: gpu.bf16_flops),
    )
    return replace(
        slowest, name=" and ".join(names), total=smallest.total, reserve=smallest.reserve
    )


def gpus_here(devices: Sequence[torch.device]) -> tuple[GPU, ...]:
    """The GPUs of these devices of this machine."""
    gpus = []
    for device in devices:
        if device.type != "cuda":
            raise UserError(
                f"there is no GPU to plan for ({device}); name the GPUs to plan for: --gpus 24GiB"
            )
        properties = torch.cuda.get_device_properties(device)
        gpus.append(gpu_named(properties.name, properties.total_memory))
    return tuple(gpus)


def keeping_reserves(gpus: Sequence[GPU], reserve_gib: Sequence[float]) -> tuple[GPU, ...]:
    """The GPUs without the memory that `train.reserve` leaves to other programs, in addition to
    each plan's own reserve: GiB for each, or one number for all, or none."""
    reserves = per_device(reserve_gib, len(gpus), "train.reserve")
    for index, (gpu, gib) in enumerate(zip(gpus, reserves, strict=True)):
        if gpu.reserve + gib * GIB >= gpu.total:
            raise UserError(
                f"train.reserve = {list(reserve_gib)} leaves nothing of {gpu.name} (number "
                f"{index}), which has {gpu.total / GIB:.1f} GiB, of which CUDA uses "
                f"{gpu.reserve / GIB:.1f}; lower it, or leave the device out"
            )
    return tuple(
        replace(gpu, reserve=gpu.reserve + int(gib * GIB))
        for gpu, gib in zip(gpus, reserves, strict=True)
    )


_OTHER_PRODUCTS = {"ti", "super", "d", "laptop", "mobile", "max", "nvl"}
"""Words after a GPU's name that make it another one."""


def gpu_named(name: str, total: int) -> GPU:
    """The GPU that the driver calls `name`, with the memory that torch reports; an unknown one gets
    rates by its size."""
    # Whole words, and none that makes another product of them: the A10G is no A10, a laptop's RTX
    # 4090 no RTX 4090.
    words = re.findall(r"[a-z0-9]+", name.lower())
    written = {
        _plain(" ".join(words[begin:end]))
        for begin, end in combinations(range(len(words) + 1), 2)
        if not words[end:] or words[end] not in _OTHER_PRODUCTS
    }
    fitting = [
        gpu for gpu, names in KNOWN_GPUS if written & {*names, _plain(gpu.name.split("-")[0])}
    ]
    # A different memory is another product, too.
    fitting = [gpu for gpu in fitting if abs(gpu.total - total) < total / 10]
    if not fitting:
        return of_size(total, name)
    longest = max(fitting, key=lambda gpu: len(_plain(gpu.name)))
    return replace(longest, name=name, total=total, reserve=default_reserve(total))
