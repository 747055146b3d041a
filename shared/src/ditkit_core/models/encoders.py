"""The models next to the transformer: frozen encoders, samplers, and the description of both that a
memory plan needs."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.tiling import Tiles

Streaming = Literal["auto", "always", "never"]
"""Whether an encoder's weights are streamed through memory layer by layer, for many items at once,
instead of being loaded whole. `auto` streams if the whole encoder does not fit."""


class VaeMode(NamedTuple):
    """How a VAE encodes or decodes."""

    dtype: torch.dtype = torch.float32
    """Of its weights and of all that it computes; latents and pixels are in fp32."""
    tiled: bool = False

    @property
    def label(self) -> "VaeModeLabel":
        """The mode in words; `whole` is in fp32."""
        if self.dtype == torch.float32:
            return "in tiles" if self.tiled else "whole"
        return "in bf16 tiles" if self.tiled else "in bf16"


WHOLE = VaeMode()
"""In fp32 and not in tiles."""
VaeModeLabel = Literal["whole", "in bf16", "in tiles", "in bf16 tiles"]


def decodings_of(dtype: str, *, tiled: bool) -> tuple[VaeMode, ...]:
    """The ways to decode that a configuration allows, the most exact first: the first one that
    memory has room for is taken.

    `tiled` allows tiles alone; otherwise they are the last way.
    """
    dtypes = {
        "fp32": (torch.float32,),
        "bf16": (torch.bfloat16,),
        "auto": (torch.float32, torch.bfloat16),
    }[dtype]
    # bf16 before tiles: its difference is small everywhere, and tiles may show seams.
    untiled = [] if tiled else [VaeMode(vae_dtype) for vae_dtype in dtypes]
    return (
        *untiled,
        *(VaeMode(vae_dtype, tiled=True) for vae_dtype in (dtypes if tiled else dtypes[-1:])),
    )


@dataclass(frozen=True, eq=False)
class Prompt:
    """A text with the references that its encoder sees."""

    text: str
    pictures: Sequence[Float[Tensor, "3 height width"]] = ()
    """Pixels in [-1, 1] of each reference, in order, at the size that `DataSpec.picture_size`
    gives."""


@runtime_checkable
class Encoder(Protocol):
    """A frozen encoder of the encode stage (VAE, text encoder), loaded only between `load` and
    `unload`."""

    @property
    def identity(self) -> str:
        """Digest of weights and settings, known without loading them: part of the cache key."""
        ...

    @property
    def items_at_once(self) -> int:
        """Number of items that one call takes: 1, or more if every call streams all weights through
        memory."""
        ...

    def load(self) -> None:
        """Read the weights onto the device."""
        ...

    def encode(
        self, items: Sequence[Any], advance: Callable[[float], None] = ...
    ) -> list[dict[str, Tensor]]:
        """Encode items: each is pixels [3, frames, height, width] in [-1, 1] for media, a caption
        for text, or a `Prompt` where the family has a `DataSpec.picture_size`.

        Args:
            items: At most `items_at_once`.
            advance: Called with the finished share of the work, in items; the shares add up to the
                number of items.

        Returns:
            CPU tensors by name for each item; media encoders return `latents`, without a batch
            dimension.
        """
        ...

    def unload(self) -> None:
        """Free the weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A sample to generate."""

    conditions: Mapping[str, Tensor]
    """The prompt, as the text encoder returned it, and further conditions."""
    negative: Mapping[str, Tensor] | None
    """The same for the negative prompt; None if there is none."""
    references: Sequence[Tensor] = ()
    """Latents of the references, as the media encoder returned them, in order."""
    frames: int
    height: int
    """Pixels; likewise `width`."""
    width: int
    steps: int
    guidance: float
    """Guidance strength for a transformer that has none of its own."""
    shift: float
    seed: int


class Denoiser:
    """The transformer that denoises one sample, until another expert takes over.

    Two experts may not fit into memory together. So the reference to the model is dropped on the
    change, even if the sampler still has this object.
    """

    def __init__(self, model: StagedModel, engine: Engine, guidance: float):
        """Use a transformer in eval mode."""
        self._current: tuple[StagedModel, Engine] | None = (model, engine)
        self.guidance = guidance

    @property
    def model(self) -> StagedModel:
        """The transformer; read this in each step, and do not keep the result over a `yield`."""
        assert self._current is not None, "another transformer took over"
        return self._current[0]

    def __call__(self, inputs: Any) -> Any:
        """The transformer's prediction."""
        assert self._current is not None, "another transformer took over"
        model, run = self._current
        return model(inputs, engine=run)  # as a module is called: FSDP2 gathers its weights there

    def release(self) -> None:
        """Drop the reference to the model."""
        self._current = None


class Decoder(Protocol):
    """Makes pixels of latents, with weights that are loaded when they are needed."""

    def decode(self, latents: Tensor, seed: int = 0) -> Float[Tensor, "3 frames height width"]:
        """Pixels in [0, 1] on the CPU; noise of the decoder, if it has any, is of the sample's
        seed."""
        ...

    @property
    def decoded(self) -> str:
        """How the last sample was decoded: a `VaeMode.label`, perhaps on the CPU; empty before the
        first."""
        ...

    def unload(self) -> None:
        """Free the weights."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Generates samples with our transformers and the family's scheduler and VAE."""

    @property
    def decoder(self) -> Decoder:
        """Makes pixels of its latents."""
        ...

    def denoise(self, job: GenerationRequest) -> Generator[float, Denoiser, Tensor]:
        """Generate one sample step by step; the caller disables gradients.

        Yields:
            The noise level of each step, in [0, 1], before the step. The caller sends back the
            `Denoiser` for this step. The scheduler's state is kept when another transformer takes
            over.

        Returns:
            Latents, without a batch dimension.
        """
        ...


@dataclass(frozen=True)
class DecodedBy:
    """A `Sampler` whose latents another decoder makes pixels of."""

    denoise: Callable[[GenerationRequest], Generator[float, Denoiser, Tensor]]
    decoder: Decoder


LayerContext = Callable[[str], AbstractContextManager[nn.Module]]
"""From a submodule's name to the submodule, which has its weights as long as the context lasts."""


@dataclass(frozen=True, kw_only=True)
class AuxiliaryModel:
    """A module that runs next to the transformer while encoding or sampling, as a memory plan sees
    it: without weights."""

    name: str
    """`text encoder`, `VAE encoder`, `VAE decoder`, …"""
    stage: Literal["encode", "sample"]
    build: Callable[[torch.dtype], nn.Module]
    """From a dtype to the module on `meta`, in the dtype that it runs in: a text encoder and a VAE
    take the one that is given."""
    run: Callable[[nn.Module, tuple[int, int, int], torch.device], Any]
    """The forward that the encoder or sampler calls, on one item of (frames, height, width),
    without gradients, on the device of its parameters. The result stays in memory until the caller
    drops it."""
    run_streamed: Callable[[nn.Module, torch.device, Callable[[], LayerContext]], Any] | None = None
    """The same for as many items as are encoded at once while weights are streamed layer by layer;
    None if streaming is not possible. Each call of the last argument allocates another buffer for
    streamed weights."""
    tiles: Tiles | None = None
    """The tiles that it can process one at a time; None if it takes only whole clips."""
