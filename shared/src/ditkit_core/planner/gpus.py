"""Cards to plan for: what they hold, and the published figures that a time per step is estimated from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ditkit_core.config.sizes import GIB, SIZE
from ditkit_core.engine.devices import per_device
from ditkit_core.errors import UserError

RESERVE_BYTES = 6 * GIB // 10
"""What no tensor of ours gets on any card: the CUDA context with its libraries, and what the driver keeps."""
RESERVE_SHARE = 0.02
"""Share of a card that is left to gaps between the allocator's blocks."""

_EXAMPLES = "write 24GiB, 2x24GiB,1x16GiB, rtx4090 or 2xrtx3090,a100-80"
_ENTRY = re.compile(r"(?:(\d+)\s*[x*]\s*)?(\S.*)")
_MOST_CARDS = 8


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One device: its memory in bytes, rates in units per second."""

    name: str
    total: int
    """Bytes that the driver reports."""
    reserve: int
    """Bytes of them that a run cannot have."""
    bf16_flops: float
    """Dense matrix products in bf16 with sums in fp32, without sparsity."""
    fp32_flops: float
    """Products in fp32 proper; ours do not round to TF32."""
    memory_bandwidth: float
    """Bytes per second of its own memory."""
    host_bandwidth: float
    """Bytes per second of its PCIe link, in one direction."""
    source: str
    """Where the figures are from."""

    def keeping_free(self, num_bytes: int) -> "GPU":
        """The card when others have `num_bytes` of it besides."""
        return replace(self, reserve=self.reserve + num_bytes)


def default_reserve(total: int) -> int:
    """Bytes of a card with `total` that a plan leaves free."""
    return RESERVE_BYTES + int(total * RESERVE_SHARE)


_AMPERE = "NVIDIA Ampere GA102 whitepaper"
_ADA = "NVIDIA Ada whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell whitepaper"
_PCIE = {"3x16": 15.75e9, "4x8": 15.75e9, "4x16": 31.5e9, "5x16": 63.0e9}

# name, other names, MiB as the driver reports them, TFLOP/s in bf16 and in fp32, GB/s of memory, PCIe, source. GeForce cards multiply
# in bf16 with fp32 sums at half the rate that their fp16 figure has; what is sold as "with sparsity" is halved here.
_TABLE = (
    ("rtx3090", "3090", 24576, 71.0, 35.6, 936, "4x16", _AMPERE),
    ("rtx4060ti-16", "4060ti-16|4060ti|rtx4060ti", 16380, 44.1, 22.1, 288, "4x8", _ADA),
    ("rtx4070tis", "4070tis|rtx4070tisuper|4070tisuper", 16376, 88.2, 44.1, 672, "4x16", _ADA),
    ("rtx4080", "4080", 16376, 97.5, 48.7, 717, "4x16", _ADA),
    ("rtx4090", "4090", 24564, 165.2, 82.6, 1008, "4x16", _ADA),
    ("rtx5080", "5080", 16303, 112.6, 56.3, 960, "5x16", _BLACKWELL),
    ("rtx5090", "5090", 32607, 209.5, 104.8, 1792, "5x16", _BLACKWELL),
    ("a6000", "rtxa6000", 49140, 154.8, 38.7, 768, "4x16", "NVIDIA RTX A6000 datasheet"),
    ("l40s", "", 46068, 362.0, 91.6, 864, "4x16", "NVIDIA L40S datasheet"),
    ("a100-40", "", 40960, 312.0, 19.5, 1555, "4x16", "NVIDIA A100 datasheet"),
    ("a100-80", "a100", 81920, 312.0, 19.5, 2039, "4x16", "NVIDIA A100 datasheet, SXM"),
    ("h100-80", "h100", 81559, 989.4, 66.9, 3350, "5x16", "NVIDIA H100 datasheet, SXM"),
    ("h200-141", "h200", 143771, 989.4, 66.9, 4800, "5x16", "NVIDIA H200 datasheet"),
)


def _known_cards() -> tuple[tuple[GPU, frozenset[str]], ...]:
    known = []
    for name, others, mebibytes, bf16, fp32, memory, link, source in _TABLE:
        total = mebibytes * 2**20
        card = GPU(
            name=name,
            total=total,
            reserve=default_reserve(total),
            bf16_flops=bf16 * 1e12,
            fp32_flops=fp32 * 1e12,
            memory_bandwidth=memory * 1e9,
            host_bandwidth=_PCIE[link],
            source=f"{source}; PCIe {link[0]} {link[1:]}",
        )
        known.append((card, frozenset(_plain(each) for each in (name, *others.split("|")) if each)))
    return tuple(known)


def _plain(name: str) -> str:
    """A card's name as it is compared: letters and digits alone, without the maker, and `80` for `80gb`."""
    words = re.sub(r"\b(nvidia|geforce|tesla)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", re.sub(r"(\d)\s*gi?b\b", r"\1", words))


KNOWN_GPUS = _known_cards()
"""Cards with their published figures, each with the names it goes by."""


def parse_gpus(text: str) -> tuple[GPU, ...]:
    """The cards that a text names, in order.

    A size in GB is taken as cards are sold: 24GB is a card of 24 GiB. A size says nothing of speed: rates are then those of the slowest
    card of the table that has as much memory.

    Args:
        text: Entries with commas between, each a size (`24GiB`) or a known card (`rtx4090`), `2x` before it for two.

    Raises:
        UserError: If an entry is neither.
    """
    cards: list[GPU] = []
    for entry in text.lower().split(","):
        found = _ENTRY.fullmatch(entry.strip())
        if not found:
            raise UserError(f"--gpus {text!r} names no card before or after a comma; {_EXAMPLES}")
        count = int(found[1] or 1)
        card = _by_size(found[2]) or next((card for card, names in KNOWN_GPUS if _plain(found[2]) in names), None)
        if card is None:
            names = ", ".join(card.name for card, _ in KNOWN_GPUS)
            raise UserError(f"--gpus {text!r}: {entry.strip()!r} is no size and no card of {names}; {_EXAMPLES}")
        if not 1 <= count <= _MOST_CARDS - len(cards):
            raise UserError(f"--gpus {text!r}: 1 to {_MOST_CARDS} cards can be planned for; {_EXAMPLES}")
        if card.reserve >= card.total:
            raise UserError(
                f"--gpus {text!r}: {entry.strip()!r} is less than what CUDA itself takes, {card.reserve / GIB:.1f} GiB; {_EXAMPLES}"
            )
        cards += [card] * count
    return tuple(cards)


def _by_size(text: str) -> GPU | None:
    found = SIZE.fullmatch(text)
    return of_size(int(float(found[1]) * GIB), f"{found[1]}GiB") if found else None


def of_size(total: int, name: str) -> GPU:
    """A card of which only the memory is known: the rates of the slowest known one with as much, or of the largest."""
    known = sorted((card for card, _ in KNOWN_GPUS), key=lambda card: card.total)
    as_large = [card for card in known if card.total * 1.1 >= total] or known[-1:]
    like = min(as_large, key=lambda card: card.bf16_flops)
    source = f"rates assumed as of {like.name}, the slowest known with as much memory ({like.source})"
    return replace(like, name=name, total=total, reserve=default_reserve(total), source=source)


def gpus_here(devices: Sequence[torch.device]) -> tuple[GPU, ...]:
    """The cards of this machine behind these devices.

    Raises:
        UserError: If one is no GPU.
    """
    cards = []
    for device in devices:
        if device.type != "cuda":
            raise UserError(f"there is no GPU to plan for ({device}); say for which cards: --gpus 24GiB")
        properties = torch.cuda.get_device_properties(device)
        cards.append(gpu_named(properties.name, properties.total_memory))
    return tuple(cards)


def keeping_reserves(cards: Sequence[GPU], reserve_gib: Sequence[float]) -> tuple[GPU, ...]:
    """The cards less what `train.reserve` leaves to others, beside what a plan leaves free of any card.

    Args:
        cards: In their order.
        reserve_gib: For each, or one for all, or none.

    Raises:
        UserError: If it does not say which card it is of, or leaves nothing of one.
    """
    reserves = per_device(reserve_gib, len(cards), "train.reserve")
    kept = tuple(card.keeping_free(int(gib * GIB)) for card, gib in zip(cards, reserves, strict=True))
    for index, card in enumerate(kept):
        if card.reserve >= card.total:
            raise UserError(
                f"train.reserve = {list(reserve_gib)} leaves nothing of {card.name} (number {index}), which has "
                f"{card.total / GIB:.1f} GiB, of which CUDA takes {cards[index].reserve / GIB:.1f}; lower it, or leave the device out"
            )
    return kept


def gpu_named(name: str, total: int) -> GPU:
    """The card that a driver calls `name`, with the memory that it reports; unknown ones by their size."""
    plain = _plain(name)
    fitting = [
        card for card, names in KNOWN_GPUS if any(each in plain for each in {*names, _plain(card.name.split("-")[0])})
    ]
    fitting = [card for card in fitting if abs(card.total - total) < total / 10 and "laptop" not in plain]
    if not fitting:
        return of_size(total, name)
    known = max(fitting, key=lambda card: len(_plain(card.name)))
    return replace(known, name=name, total=total, reserve=default_reserve(total))
