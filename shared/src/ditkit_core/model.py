"""The seam: what the core asks of a model, and the plain forward that everything else is compared with.

A model is an embedding, blocks in execution order, and a head. What passes between them is a *carry*: a NamedTuple of
everything one block hands to the next. What is not in the carry does not cross a device boundary, so a block reads
nothing else. The model says where it may be cut; the core decides how each block is run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.components import Components
from ditkit_core.precision import Precision


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

    def __call__(self, inputs: Any, run: "Engine" = ...) -> Any: ...


Engine = Callable[[Any, Any], Any]
"""Runs a whole forward: (model, inputs) -> prediction."""


def run_plain(model: StagedModel, inputs: Any) -> Any:
    """The forward without any lever: embed, every block, head."""
    carry = model.embed(inputs)
    for block in model.blocks():
        carry = block(carry)
    return model.head(carry)


@runtime_checkable
class Encoder(Protocol):
    """A frozen encoder of the encode stage (VAE, text encoder), loaded only between `load` and `unload`."""

    identity: str
    """Digest of weights and settings, known without loading: part of the cache key."""

    def load(self) -> None:
        """Read the weights onto the device."""
        ...

    def encode(self, item: Any) -> dict[str, Tensor]:
        """Encode one item: pixels [3, frames, height, width] in [-1, 1] for media, a caption for text.

        Returns CPU tensors by name; media encoders return `latents`, without a batch dimension.
        """
        ...

    def unload(self) -> None:
        """Free the weights."""
        ...


@dataclass(frozen=True, kw_only=True)
class SampleJob:
    """One sample to draw: conditions as the text encoder returned them, size in pixels."""

    conditions: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None
    frames: int
    height: int
    width: int
    steps: int
    guidance: float
    shift: float
    seed: int


@runtime_checkable
class Sampler(Protocol):
    """Draws samples with our transformer under the family's scheduler and VAE."""

    def denoise(self, model: StagedModel, run: Engine, job: SampleJob, on_step: Callable[[], None]) -> Tensor:
        """Latents of one sample, without a batch dimension; `on_step` is called once a step."""
        ...

    def decode(self, latents: Tensor) -> Float[Tensor, "3 frames height width"]:
        """Pixels in [0, 1] on the CPU."""
        ...


@dataclass(frozen=True, kw_only=True)
class StateDictNames:
    """Parameter names of a model's files, in every form, against ours."""

    prefixes: tuple[str, ...]
    """Prefixes that files may put before every name (`model.diffusion_model.`), longest first."""

    to_native: Callable[[str], str | None]
    """A name without prefix, in any known form, to our parameter name; None if no form knows it."""

    from_native: Mapping[str, Callable[[str], str]]
    """By form (`official`, `diffusers`): our parameter name to that form's."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the core needs to train one family: plain values and functions, no base class."""

    name: str
    """Prefix of the commands: `name` for name-train."""

    presets: Mapping[str, Any]
    """Preset name to architecture (a frozen dataclass)."""

    build: Callable[[Any, Precision], Any]
    """Architecture and precision to a StagedModel, on the default device (the core builds on `meta`)."""

    keep_fp32: Callable[[str], bool]
    """Whether the parameter of this name stays in fp32 whatever the model's dtype."""

    names: StateDictNames

    adapter_targets: Mapping[str, tuple[str, ...]]
    """Named sets of adapter targets, as name suffixes of Linear modules; the first is the default."""

    make_inputs: Callable[[Sequence[Tensor], Tensor, Sequence[Mapping[str, Tensor]]], Any]
    """(noised latents per sample, sigma [batch] fp32, cached tensors per sample) to the model's inputs.

    The model's prediction is then a sequence of velocities, one per sample, shaped like its latents.
    """

    num_tokens: Callable[[Tensor], int]
    """Tokens that one sample's latents become."""

    media_encoder: Callable[[Components, torch.device], Encoder]
    text_encoder: Callable[[Components, torch.device, torch.dtype], Encoder]
    sampler: Callable[[Components, torch.device, torch.dtype], Sampler]

    frame_step: int
    """Clips have 1 + k * frame_step frames."""

    size_step: int
    """Height and width are multiples of this many pixels."""

    fps: float
    """Frame rate that the model was trained at, in frames per second."""

    write_demo: Callable[[Path], None]
    """Write generated inputs of the demo (checkpoint, media, captions) into a folder; deterministic."""

    demo_config: Path
    """The run file of the demo; relative paths in it start at the demo's folder."""

    infer_arch: Callable[[Mapping[str, Any]], Any] | None = None
    """A diffusers `transformer/config.json` to the architecture; raises KeyError where it is another model's."""

    verify_export: Callable[[Path, Components, Any, Engine], str] | None = None
    """(adapter file, components, model with that adapter, engine): load the file as a user would (a diffusers pipeline)
    and compare outputs with ours; returns one line that says what was compared, raises UserError on a difference."""
