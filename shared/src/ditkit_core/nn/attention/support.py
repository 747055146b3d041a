"""What each attention backend supports. Apart from the kernels, because help prints it, and must
not wait for torch."""

from dataclasses import dataclass
from typing import Any

from ditkit_core.documents.tables import Table


def capability_text(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it, such as 8.9."""
    return "{}.{}".format(*capability)


@dataclass(frozen=True, kw_only=True)
class Support:
    """What a backend supports."""

    module: str | None = None
    """The module that must be importable; None if it is torch itself."""
    has_backward: bool = True
    takes_mask: bool
    takes_dropout: bool
    half_only: bool
    """Runs in fp16 and bf16 only."""
    devices: tuple[str, ...] = ()
    """Types of device that it runs on; empty means all."""
    least: tuple[int, int] = (0, 0)
    """The least compute capability of NVIDIA GPUs that it runs on, with its backward if it has
    one."""
    most: tuple[int, int] | None = None
    """The highest, if it is only for some generations."""
    mixes: bool = True
    """Whether one process can run it on GPUs of different compute capability."""
    only: tuple[tuple[int, int], ...] = ()
    """Those that it has kernels for, if it has none for others between `least` and `most`."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it runs on GPUs of a compute capability."""
        if self.only:
            return capability in self.only
        return self.least <= capability and (self.most is None or capability <= self.most)

    @property
    def capabilities(self) -> str:
        """The compute capabilities of its GPUs: `any`, `8.0+`, `8.0-9.0`, or each by its number."""
        if self.only:
            return ", ".join(map(capability_text, self.only))
        least = capability_text(self.least)
        return (
            f"{least}-{capability_text(self.most)}"
            if self.most
            else f"{least}+"
            if any(self.least)
            else "any"
        )


_AMPERE, _HOPPER = (8, 0), (9, 0)
_SAGE = (_AMPERE, (8, 6), (8, 9), _HOPPER, (12, 0), (12, 1))
"""Source: `sageattn` in thu-ml/SageAttention, sageattention/core.py, which raises for all others,
also for GPUs of data centers after Hopper (10.0)."""


def _on_gpus(
    *,
    half_only: bool,
    takes_mask: bool,
    takes_dropout: bool = True,
    least: tuple[int, int] = (0, 0),
) -> Support:
    return Support(
        takes_mask=takes_mask,
        takes_dropout=takes_dropout,
        half_only=half_only,
        devices=("cuda",),
        least=least,
    )


def _library(module: str, **others: Any) -> Support:
    defaults: dict[str, Any] = {
        "takes_mask": False,
        "takes_dropout": False,
        "half_only": True,
        "devices": ("cuda",),
    }
    return Support(module=module, **defaults | {"least": _AMPERE} | others)


SUPPORT: dict[str, Support] = {
    "sdpa": Support(takes_mask=True, takes_dropout=True, half_only=False),
    "sdpa_flash": _on_gpus(half_only=True, takes_mask=False, least=_AMPERE),
    "sdpa_efficient": _on_gpus(half_only=False, takes_mask=True),
    "sdpa_cudnn": _on_gpus(half_only=True, takes_mask=True, least=_AMPERE),
    "sdpa_math": Support(takes_mask=True, takes_dropout=True, half_only=False),
    # Loops over spans in Python, in any dtype on any device.
    "exact": Support(takes_mask=True, takes_dropout=False, half_only=False),
    # On a CPU torch has no backward for it.
    "flex": _on_gpus(half_only=False, takes_mask=True, takes_dropout=False),
    "varlen": _on_gpus(half_only=True, takes_mask=True, takes_dropout=False, least=_AMPERE),
    "flash2": _library("flash_attn", takes_dropout=True),
    # On later GPUs than Hopper it launches Hopper's kernels, which these cannot run.
    "flash3": _library("flash_attn_interface", most=_HOPPER),
    # Its forward runs from Ampere on. It asks once for the compute capability of the current GPU
    # (`_get_device_arch` in Dao-AILab/flash-attention, flash_attn/cute/interface.py), chooses
    # kernels by that for all GPUs, and `flash_attn_func` does not take another.
    "flash4": _library("flash_attn.cute", least=_HOPPER, mixes=False),
    "sage": _library("sageattention", has_backward=False, only=_SAGE),
}
"""By the names for `train.attention`. `sdpa` lets torch choose a kernel, `sdpa_…` forces one, and
`exact` is slow, for comparisons."""


def support_matrix() -> str:
    """A table of what each backend supports, for help texts."""
    word = {True: "yes", False: "no"}
    head = (
        "backend",
        "backward",
        "key mask",
        "dropout",
        "dtype",
        "device",
        "capability",
        "needs",
        "attn_only keeps it",
    )
    rows = [
        (
            name,
            word[b.has_backward],
            word[b.takes_mask],
            word[b.takes_dropout],
            "bf16 fp16" if b.half_only else "any",
            " ".join(b.devices) or "any",
            b.capabilities,
            b.module or "torch",
            word[b.has_backward],
        )
        for name, b in SUPPORT.items()
    ]
    lines = Table(head=head, rows=rows, num_left=len(head)).lines()
    return "\n".join(["Attention backends (train.attention):", *(f"  {line}" for line in lines)])
