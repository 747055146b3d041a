"""What encodes, samples and decodes next to the transformer: frozen encoders, samplers, and what a plan has to know of them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.tiling import Tiles

Streaming = Literal["auto", "always", "never"]
"""Whether an encoder's weights pass through memory layer by layer, for many items at once, instead of lying there whole: `auto` does
where they would not fit."""


@runtime_checkable
class Encoder(Protocol):
    """A frozen encoder of the encode stage (VAE, text encoder), loaded only between `load` and `unload`."""

    identity: str
    """Digest of weights and settings, known without loading: part of the cache key."""

    items_at_once: int
    """How many items one call takes: 1, or more where all weights pass through memory once per call."""

    def load(self) -> None:
        """Read the weights onto the device."""
        ...

    def encode(self, items: Sequence[Any], advance: Callable[[float], None] = ...) -> list[dict[str, Tensor]]:
        """Encode items: each is pixels [3, frames, height, width] in [-1, 1] for media, a caption for text.

        Args:
            items: At most `items_at_once`.
            advance: Told of the work as it is done, in items; the parts add up to as many as were given.

        Returns CPU tensors by name, item by item; media encoders return `latents`, without a batch dimension.
        """
        ...

    def unload(self) -> None:
        """Free the weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """One sample to draw: conditions as the text encoder returned them, size in pixels."""

    conditions: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None
    references: Sequence[Tensor] = ()
    """Latents of the pictures to edit, as the media encoder returned them, in order."""
    frames: int
    height: int
    width: int
    steps: int
    guidance: float
    """Strength, for a transformer that has none of its own."""
    shift: float
    seed: int


class Denoiser:
    """A transformer at work on one sample, until another takes over: then it is let go of, whoever still has this object."""

    def __init__(self, model: StagedModel, engine: Engine, guidance: float):
        """Take a model to work.

        Args:
            model: The transformer, in eval mode.
            engine: The engine that runs it.
            guidance: Strength that it is guided with.
        """
        self._at_work: tuple[StagedModel, Engine] | None = (model, engine)
        self.guidance = guidance

    @property
    def model(self) -> StagedModel:
        """The transformer; to be asked for in each step, and not to be kept over a `yield`."""
        assert self._at_work is not None, "another transformer took over"
        return self._at_work[0]

    def __call__(self, inputs: Any) -> Any:
        """Its prediction."""
        assert self._at_work is not None, "another transformer took over"
        model, run = self._at_work
        return run(model, inputs)

    def let_go(self) -> None:
        """Forget the model."""
        self._at_work = None


@runtime_checkable
class Sampler(Protocol):
    """Draws samples with our transformers under the family's scheduler and VAE."""

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        """Draw one sample step by step; who asks for the steps turns gradients off.

        Yields:
            The noise level of each step, in [0, 1], before the step; what is sent back takes it. The scheduler's state lives on
            where another transformer takes over.

        Returns:
            Latents, without a batch dimension.
        """
        ...

    def decode(self, latents: Tensor) -> Float[Tensor, "3 frames height width"]:
        """Pixels in [0, 1] on the CPU."""
        ...

    def release(self) -> None:
        """Free what decoding loaded; it is loaded again when needed."""
        ...


LayerContext = Callable[[str], AbstractContextManager[nn.Module]]
"""A submodule's name to the submodule, with its weights for as long as the context lasts."""


@dataclass(frozen=True, kw_only=True)
class AuxiliaryModel:
    """A module that works beside the transformer in encoding or drawing: what a plan has to know of it, without its weights."""

    name: str
    """`text encoder`, `VAE encoder`, `VAE decoder`, …"""
    stage: Literal["encode", "sample"]
    build: Callable[[torch.dtype], nn.Module]
    """The dtype of text encoders to the module on `meta`, in the dtype that it runs in: that one for a text encoder, its own for a VAE."""
    run: Callable[[nn.Module, tuple[int, int, int], torch.device], Any]
    """Its forward on one item of (frames, height, width), without gradients, on the device of its parameters: what the encoder or
    the sampler calls. The result is held until the caller drops it."""
    run_streamed: Callable[[nn.Module, torch.device, Callable[[], LayerContext]], Any] | None = None
    """The same for as many items as are encoded at once while weights pass through memory layer by layer; None if they cannot. Each
    call of the last argument is new memory for weights to pass through."""
    tiles: Tiles | None = None
    """The tiles that it can work in, one at a time; None if it takes every clip whole."""
