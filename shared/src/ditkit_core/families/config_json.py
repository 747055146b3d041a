"""Checks of a published `config.json`, from which a family reads the sizes of an architecture."""

from collections.abc import Mapping, Sequence
from typing import Any


def check_axes(axes: Sequence[int], head_dim: int, key: str = "axes_dims_rope") -> None:
    """Refuse axes (frame, row and column, say) whose rotated features are not all of a head.

    Args:
        axes: Rotated features of a head by axis.
        head_dim: Width of an attention head.
        key: What the file calls the axes.

    Raises:
        ValueError: If they do not add up.
    """
    if sum(axes) != head_dim:
        raise ValueError(f"{key} {list(axes)} do not add up to a head of {head_dim} features")


def check_fixed(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Refuse a switch or size that differs from the only one that the family's code computes.

    Args:
        config: The file's content; what it leaves out is as expected.
        fixed: The value of each.

    Raises:
        ValueError: For the first that differs.
    """
    for name, value in fixed.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} is {config[name]}, and only {value} is known")
