"""The seam: what the core asks of a model, and the plain forward that everything else is compared with.

A model is an embedding, blocks in execution order, and a head. What passes between them is a *carry*: a NamedTuple of
everything one block hands to the next. What is not in the carry does not cross a device boundary, so a block reads
nothing else. The model says where it may be cut; the core decides how each block is run.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class StagedModel(Protocol):
    """An nn.Module that an engine can run block by block without knowing its architecture.

    `embed` maps inputs to the carry, `head` maps the last carry to the prediction. Every parameter belongs to exactly
    one of `embed`, a block, or `head`. `forward(inputs, run=run_plain)` returns `run(self, inputs)`: the engine is a plain
    callable passed in, so no lever wraps a module or renames a parameter, and the model itself is the root.
    """

    embed: nn.Module
    head: nn.Module

    def blocks(self) -> Sequence[nn.Module]:
        """Blocks in execution order, each a map from carry to carry."""
        ...

    def __call__(self, inputs: Any, engine: "Engine" = ...) -> Any: ...

    # Of nn.Module, which a protocol cannot inherit from.
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def train(self, mode: bool = True) -> Any: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def state_dict(self) -> dict[str, Any]: ...


class Engine(Protocol):
    """Runs a whole forward."""

    def __call__(self, model: Any, inputs: Any, /) -> Any:
        """Inputs to the prediction of the model, which is a `StagedModel` or, for the planner, some of one's blocks."""
        ...


def run_plain(model: StagedModel, inputs: Any) -> Any:
    """The forward without any lever: embed, every block, head."""
    carry = model.embed(inputs)
    for block in model.blocks():
        carry = block(carry)
    return model.head(carry)
