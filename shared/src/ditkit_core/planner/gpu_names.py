"""Names of GPUs that people type for plans, and whose rates are not in the table of `gpus.py`: their memory is enough to plan with."""

import re
from collections.abc import Iterable

from ditkit_core.config.nearest import nearest_word

# The size to plan with, and the names that are sold with it. Less than the advertised GB where ECC takes some (l4, a40: 24 and 48 GB), where
# GB are decimal (b300: 288), or where the host shares it (gb10: 128), by what torch and nvidia-smi report. GPUs older than Ampere are left out:
# they compute no bf16, and a plan would take them for one that does.
_SOLD = {
    8: "rtx3050 rtx3060ti rtx3070 rtx3070ti rtx4060 rtx4060ti-8 rtx5050 rtx5060 rtx5060ti-8 rtx3070laptop rtx4060laptop rtx4070laptop "
    "rtx5060laptop rtx5070laptop",
    12: "rtx3080-12 rtx3080ti rtx5070 rtx4080laptop rtx5070tilaptop a2000-12",
    15: "a2 a16",
    16: "rtx5060ti-16 rtx5060ti rtx5070ti rtx3080laptop rtx4090laptop rtx5080laptop a4000",
    20: "a4500 rtx4000ada",
    22.5: "a10g l4",
    24: "rtx3090ti rtx4090d rtx5090laptop a5000 a5500 a30 rtx4500ada rtxpro4000",
    32: "rtx5090d rtx5000ada rtxpro4500",
    45: "a40 l40 l20",
    48: "rtx6000ada rtx4090-48 rtxpro5000",
    72: "rtxpro5000-72",
    80: "a800 h800",
    94: "h100nvl",
    95.5: "rtxpro6000 h20 gh200",
    120: "gb10 dgxspark",
    141: "h20-141 h200nvl",
    179: "b200",
    185: "gb200",
    268: "b300 gb300",
}
SOLD_GB: dict[str, float] = {name: size for size, names in _SOLD.items() for name in names.split()}
"""From a GPU's name to the size in GB to plan with."""

RATES_OF = dict.fromkeys(("gb10", "dgxspark"), "rtx4060ti-16")
"""GPUs with far more memory than others of their speed, and the known GPU whose rates a plan assumes."""

_NOT_NVIDIA = re.compile(
    r"(radeon|rx|mi|vega|gfx|arc|gaudi|tpu)[a-z]?\s*\d|apple|m[1-9]\s*(pro|max|ultra)?$|mps$|amd|intel"
)


def unknown_gpu(name: str, names: Iterable[str]) -> str:
    """What to do about a GPU that is not known, as the end of a sentence.

    Args:
        name: Its name in lower case.
        names: The names of GPUs with rates.
    """
    if _NOT_NVIDIA.match(name):
        return "is no GPU of NVIDIA, and ditkit trains on those alone, and slowly on CPUs"
    # Another number is another product: a 3070 is not a mistyped 4070.
    number = re.search(r"\d+", name)
    similar = [other for other in (*names, *SOLD_GB) if number and number[0] in re.findall(r"\d+", other)]
    near = nearest_word(name, similar, 0.6)
    return f"is not known; {f'did you mean {near}? Or ' if near else ''}write its memory, as in 2x24GiB,1x16GiB"
