"""The interface between the core and a model, and the plain forward that every other forward is
compared with.

A model is an embedding, blocks in execution order, and a head. A *carry* passes between them: a
NamedTuple of everything that one block hands to the next. Only the carry crosses a device boundary,
so a block reads nothing else. The model says where it may be split; the core decides how each block
is run.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn


class Stages(Protocol):
    """What an engine runs: a `StagedModel`; for the planner and the audit, some of its blocks or
    views of them."""

    @property
    def embed(self) -> nn.Module: ...
    @property
    def head(self) -> nn.Module: ...
    def blocks(self) -> Sequence[nn.Module]: ...


class StagedModel(Protocol):
    """An nn.Module that an engine can run block by block without knowing its architecture.

    `embed` maps inputs to the carry, `head` maps the last carry to the prediction. Every parameter
    belongs to exactly one of `embed`, a block, or `head`. `forward(inputs, run=run_plain)` returns
    `run(self, inputs)`. The engine is a plain callable that is passed in, so no technique wraps a
    module or renames a parameter, and the model itself stays the root module.
    """

    embed: nn.Module
    head: nn.Module

    def blocks(self) -> Sequence[nn.Module]:
        """The blocks in execution order; each maps a carry to a carry."""
        ...

    def __call__(self, inputs: Any, engine: "Engine" = ...) -> Any: ...

    # Of nn.Module, which a protocol cannot inherit from.
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def buffers(self) -> Iterator[Tensor]: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...
    def eval(self) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]: ...


class PartlyUsed(nn.Module):
    """A block with layers that files have and whose result nothing reads, such as those that would
    advance a stream of text that the head drops.

    Its forward leaves them out, and a full fine-tune leaves them as they are: nothing waits for
    gradients that never come.
    """

    unused: ClassVar[tuple[str, ...]] = ()
    """Names of these layers in the block."""


def unused_layers(model: StagedModel | nn.Module) -> tuple[str, ...]:
    """Names of the layers of a model whose result nothing reads."""
    return tuple(
        f"{name}.{layer}"
        for name, block in model.named_modules()
        if isinstance(block, PartlyUsed)
        for layer in block.unused
    )


class Engine(Protocol):
    """Runs a whole forward."""

    def __call__(self, model: Stages, inputs: Any, /) -> Any:
        """Compute the prediction for some inputs."""
        ...


def run_plain(model: Stages, inputs: Any) -> Any:
    """The plain forward, without checkpointing, offloading or splitting: embed, every block,
    head."""
    carry = model.embed(inputs)
    for block in model.blocks():
        carry = block(carry)
    return model.head(carry)
