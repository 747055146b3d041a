"""Activation checkpointing policies: what one block keeps for its backward, and what it computes
again.

A configuration names policies, and a mistake in one is answered before torch is imported, which
takes seconds. So this module describes them, and `run_block.py` runs blocks under them. No module
is wrapped.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a block keeps. This base class of all policies keeps everything."""

    offload: bool = False
    """Whether the kept tensors are moved to host memory until the backward."""
    names: tuple[str, ...] = ()
    """Its arguments in parentheses, if it takes any."""
    kind: ClassVar[str] = "none"
    recomputes: ClassVar[bool] = False
    """Whether the backward runs any of the block's forward again."""

    @property
    def kept_attention(self) -> tuple[str, ...] | None:
        """Names of the `attend` calls that an enclosing checkpoint keeps, empty for all; None keeps
        no region."""
        return None

    def __str__(self) -> str:
        """The policy as a configuration writes it."""
        inside = f"({', '.join(self.names)})" if self.names else ""
        return f"{self.kind}{inside}{'+offload' if self.offload else ''}"


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps the block's inputs and recomputes the rest."""

    kind: ClassVar[str] = "full"
    recomputes: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class AttentionOnly(Policy):
    """Keeps the block's inputs and the results of attention; no attention of these names (without
    names, none) runs again."""

    kind: ClassVar[str] = "attn_only"
    recomputes: ClassVar[bool] = True

    @property
    def kept_attention(self) -> tuple[str, ...] | None:
        return self.names
