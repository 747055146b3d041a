"""Zed's parameter names: ours, and the official files'.

FILL IN 3: the official names, and those of diffusers and ComfyUI where they differ, as further entries of `from_native`. A form whose tensors are
several of ours in one, or whose rows are in another order, is described by `TensorSlice`, as in FLUX.2's state_dict.py.
"""

import re

from ditkit_core.models.other_models import others_than
from ditkit_core.models.state_dict import StateDictNames

_OUTSIDE = {"embed.": "", "head.": "final_layer."}
"""ours -> official: modules before the blocks, and behind them. Blocks are called `layers` here and `blocks` there."""
_KNOWN = re.compile(r"(patch_in|text_in|time_in|time_modulation|final_layer|blocks)\.")


def to_official(name: str) -> str:
    """The official name of a parameter of ours."""
    for ours, theirs in _OUTSIDE.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name.replace("layers.", "blocks.", 1)


def to_native(name: str) -> str | None:
    """Our name of an official parameter; None if there is none of that name."""
    if not _KNOWN.match(name):
        return None
    if name.startswith("final_layer."):
        return name.replace("final_layer.", "head.", 1)
    return name.replace("blocks.", "layers.", 1) if name.startswith("blocks.") else f"embed.{name}"


NAMES = StateDictNames.renaming(
    prefixes=("model.diffusion_model.", "diffusion_model."),
    to_native=to_native,
    from_native={"official": to_official},
    others=others_than("zed"),
)
