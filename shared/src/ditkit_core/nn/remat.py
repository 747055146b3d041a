"""The mark on a block's last arithmetic, which no recompute has to repeat."""

from collections.abc import Callable

import torch
import torch_remat as remat
from torch import Tensor, nn

from ditkit_core.nn.context import settings_in_force
from ditkit_core.nn.lora import keeps_only_its_input


def last_step(
    layer: nn.Module, h: Tensor, finish: Callable[..., Tensor], *others: Tensor, name: str = "last step"
) -> Tensor:
    """A block's result: `finish(layer(h), *others)`, of which no backward needs a value.

    A checkpoint that stops recomputing at the last saved tensor leaves this out by itself; one that keeps regions replays a
    block to its end, and is told here. That is free as long as the layer keeps nothing for its backward but its input; one
    that keeps more (adapter dropout, DoRA) is recomputed like the rest.

    Args:
        layer: The block's last layer, a matmul.
        h: Its input.
        finish: Makes the block's result; keeps nothing large for its backward.
        others: What `finish` takes beside the layer's output.
        name: Unique within a block: a block of several streams has a last step in each.
    """

    def step(h: Tensor, *others: Tensor) -> Tensor:
        return finish(layer(h), *others)

    # A compiler sees for itself what the backward needs; told to keep this, it would.
    if torch.compiler.is_compiling() or settings_in_force().keep is None or not keeps_only_its_input(layer):
        return step(h, *others)
    out: Tensor = remat.region(step, name, recompute=False)(h, *others)
    # Costs nothing, as what comes next holds it too. Without it torch_remat would replay a tensor without memory in its
    # place, which neither a fake tensor nor a wrapped one survives.
    remat.recompute_needs_tensor(out)
    return out
