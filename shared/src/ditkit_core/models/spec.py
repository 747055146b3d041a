"""The seam: what the core asks of a model, and the plain forward that everything else is compared with.

A model is an embedding, blocks in execution order, and a head. What passes between them is a *carry*: a NamedTuple of
everything one block hands to the next. What is not in the carry does not cross a device boundary, so a block reads
nothing else. The model says where it may be cut; the core decides how each block is run.
"""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.models.adapter_formats import AdapterRules
from ditkit_core.models.conditions import Column, Conditioner
from ditkit_core.models.paths import Components
from ditkit_core.models.precision import Precision
from ditkit_core.models.tiling import Tiles


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


def ignored(share: float) -> None:
    """Progress that nobody watches."""


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
class SampleJob:
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

    def __init__(self, model: StagedModel, run: Engine, guidance: float):
        """Take a model to work.

        Args:
            model: The transformer, in eval mode.
            run: The engine that runs it.
            guidance: Strength that it is guided with.
        """
        self._at_work: tuple[StagedModel, Engine] | None = (model, run)
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

    def denoise(self, job: SampleJob) -> Generator[float, Denoiser, Tensor]:
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


@dataclass(frozen=True)
class Part:
    """Some rows of a tensor: number `index` of `of` equal parts along its first dimension; by default all of it."""

    name: str
    index: int = 0
    of: int = 1


@dataclass(frozen=True, kw_only=True)
class StateDictNames:
    """Parameters of a model's files, in every form, against ours.

    Forms differ in names, and in how rows are stacked: one file has q, k and v in a tensor, another has the two halves of a
    modulation in the other order. Both directions therefore say, for a tensor cut into equal pieces of rows, where each lies.
    """

    prefixes: tuple[str, ...]
    """Prefixes that files may put before every name (`model.diffusion_model.`), longest first."""

    to_native: Callable[[str], tuple[Part, ...] | None]
    """A file's name without prefix, in any known form, to the parts of our parameters that its rows are, from the first on;
    None if no form knows it."""

    from_native: Mapping[str, Callable[[str], tuple[Part, ...]]]
    """By form (`official`, `diffusers`): our parameter name to the parts of that form's tensors that its rows are."""

    bare: str = "official"
    """The form whose names an adapter file without prefixes has, as DiffSynth writes it for this family."""

    @classmethod
    def renaming(
        cls,
        *,
        prefixes: tuple[str, ...] = (),
        to_native: Callable[[str], str | None],
        from_native: Mapping[str, Callable[[str], str]] = MappingProxyType({}),
    ) -> "StateDictNames":
        """Names where every tensor of a file is one parameter."""

        def native(name: str) -> tuple[Part, ...] | None:
            renamed = to_native(name)
            return None if renamed is None else (Part(renamed),)

        def foreign(rename: Callable[[str], str]) -> Callable[[str], tuple[Part, ...]]:
            return lambda name: (Part(rename(name)),)

        return cls(
            prefixes=prefixes,
            to_native=native,
            from_native={form: foreign(rename) for form, rename in from_native.items()},
        )


@dataclass(frozen=True, kw_only=True)
class SampleDefaults:
    """How an architecture's authors draw samples."""

    steps: int
    """Steps of the scheduler."""
    guidance: float
    """Strength of guidance."""
    guided_by: Literal["negative", "embedding", "nothing"] = "negative"
    """What guidance does: with a strength above 1 the `negative` prompt is drawn too, by a second call of the model in each step; an
    `embedding` tells the model, called once; or a distilled model draws without, and `nothing` follows from it."""


@dataclass(frozen=True, kw_only=True)
class Expert:
    """One of several transformers that share the noise levels among them; each is trained by itself."""

    name: str
    """`high_noise`, `low_noise`: part of names of folders and files."""
    part: str
    """Which component it is: `transformer` or `transformer_2`."""
    min_sigma: float
    """Lowest noise level that it sees, in [0, 1)."""
    max_sigma: float
    """Its levels are below this one, and 1 itself for the noisiest expert."""
    guidance: float
    """Strength of guidance that its authors draw with."""


def no_change(item: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A training item as the cache holds it."""
    return dict(item)


Holding = Callable[[str], AbstractContextManager[nn.Module]]
"""A submodule's name to the submodule, with its weights for as long as the context lasts."""


@dataclass(frozen=True, kw_only=True)
class Companion:
    """A module that works beside the transformer in encoding or drawing: what a plan has to know of it, without its weights."""

    name: str
    """`text encoder`, `VAE encoder`, `VAE decoder`, …"""
    stage: Literal["encode", "sample"]
    build: Callable[[torch.dtype], nn.Module]
    """The dtype of text encoders to the module on `meta`, in the dtype that it runs in: that one for a text encoder, its own for a VAE."""
    run: Callable[[nn.Module, tuple[int, int, int], torch.device], Any]
    """Its forward on one item of (frames, height, width), without gradients, on the device of its parameters: what the encoder or
    the sampler calls. The result is held until the caller drops it."""
    run_streamed: Callable[[nn.Module, torch.device, Callable[[], Holding]], Any] | None = None
    """The same for as many items as are encoded at once while weights pass through memory layer by layer; None if they cannot. Each
    call of the last argument is new memory for weights to pass through."""
    tiles: Tiles | None = None
    """The tiles that it can work in, one at a time; None if it takes every clip whole."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the core needs to train one family: plain values and functions, no base class."""

    name: str
    """Prefix of the commands: `name` for name-train."""

    presets: Mapping[str, Any]
    """Preset name to architecture (a frozen dataclass)."""

    build: Callable[[Any, Precision], Any]
    """Architecture and precision to a StagedModel, on the default device (the core builds on `meta`)."""

    place_of: Callable[[str], str]
    """The place of `Precision` that the parameter of this name computes in: `matmul`, `time_mlp`, `modulation`, `norms`, `qk_norms` or
    `head`."""

    names: StateDictNames

    adapter_targets: Mapping[str, tuple[str, ...]]
    """Named sets of adapter targets, as name suffixes of Linear modules; the first is the default."""

    make_inputs: Callable[[Sequence[Tensor], Tensor, Sequence[Mapping[str, Tensor]], float], Any]
    """(noised latents per sample, sigma [batch] fp32, training items, guidance) to the model's inputs.

    The model's prediction is then a sequence of velocities, one per sample, shaped like its latents. Guidance is the value that a
    model with an embedding of it is given; others leave it.
    """

    outline: Callable[[Any, tuple[int, int, int], Sequence[tuple[int, int]]], dict[str, Tensor]]
    """(architecture, (frames, height, width), (height, width) of each reference) to an empty training item as the cache would have it,
    on the default device: what a plan is made for."""

    companions: Callable[[Any, Components], Sequence[Companion]]
    """Architecture and files to what runs beside the transformer; of files that are not here, the published sizes."""

    num_tokens: Callable[[Mapping[str, Tensor]], int]
    """Tokens that one training item is in the blocks; only shapes are read, which may be on `meta`."""

    training_shift: Callable[[Tensor], float]
    """Noise-level shift that the model is trained with on latents of this shape; 1 shifts nothing."""

    sample_defaults: Callable[[Any], SampleDefaults]
    """Architecture to the settings that its samples are drawn with unless told otherwise."""

    media_encoder: Callable[[Components, torch.device, bool], Encoder]
    """(files, device, whether it works in tiles) to the VAE as an encoder; its identity says whether it does."""
    text_encoder: Callable[[Components, torch.device, torch.dtype, Streaming], Encoder]
    sampler: Callable[[Components, torch.device, torch.dtype, bool], Sampler]
    """(files, device, dtype, whether the VAE decodes in tiles) to the sampler."""

    frame_step: int
    """Clips have 1 + k * frame_step frames; 0: the model knows still images alone."""

    size_step: int
    """Height and width are multiples of this many pixels."""

    fps: float
    """Frame rate that the model was trained at, in frames per second."""

    size: tuple[int, int, int]
    """Frames, height and width that are trained and drawn unless told otherwise."""

    write_demo: Callable[[Path], None]
    """Write generated inputs of the demo (checkpoint, media, captions) into a folder; deterministic."""

    demo_config: Path
    """The run file of the demo; relative paths in it start at the demo's folder."""

    reference_precision: Mapping[str, str] = field(default_factory=dict)
    """The preset `reference` of `precision`: the places that the official code runs in other dtypes than `default`, each to the name of a
    dtype, or to `matmul`."""

    infer_arch: Callable[[Mapping[str, Any], Mapping[str, Any]], Any | None] | None = None
    """A diffusers `transformer/config.json`, and the pipeline's `model_index.json` (empty if there is none), to the
    architecture; None where it is in a form that is not read, so that the weights' shapes decide; raises KeyError where it is another model's."""

    reference_size: Callable[[int, int, int], tuple[int, int]] | None = None
    """(height, width, how many references the sample has) of a reference picture to the size it is encoded at, in pixels; raises
    UserError for one that cannot be used. None: the model takes no references."""

    found_at: str = ""
    """`module:name` of this spec, where a process of its own imports it (previews on another device); empty: none can."""

    variant: Callable[[Any], Mapping[str, Any]] = lambda arch: {}
    """Architecture to the fields of this spec that it has otherwise: `fps`, `size`, `size_step`, …"""

    columns: Callable[[Any], Sequence[Column]] = lambda arch: ()
    """Architecture to the columns of a dataset that it is conditioned by."""

    conditioners: Callable[[Any, Components | None, torch.device, bool], Sequence[Conditioner]] = (
        lambda arch, components, device, tiled: ()
    )
    """(architecture, files, device, whether the VAE works in tiles) to what encodes conditions beside clip and caption. Without files they
    are asked for `uses` and `check` alone."""

    companion_parts: Callable[[Any], Sequence[str]] = lambda arch: ()
    """Architecture to the components that it trains with beside transformers, VAE, text encoder and tokenizer: `image_encoder`."""

    fewest_frames: int = 1
    """Clips of fewer frames teach this model next to nothing, because it is told all of them as a condition; they are warned of."""

    control_dropout: float = 0.0
    """Share of samples that are trained without the conditions that are optional, unless `train.control_dropout` says otherwise."""

    experts: Callable[[Any], Sequence[Expert]] = lambda arch: ()
    """Architecture to its experts, the noisiest first; none where one transformer sees all noise levels."""

    assemble: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = no_change
    """What the cache holds of a sample to its training item: where a condition is part of the latents, this puts it there."""

    loss_mask: Callable[[Mapping[str, Tensor]], Tensor | None] = lambda item: None
    """A training item to what of its latents is learnt: 1 where the velocity is, 0 where the model is given the data; broadcast to the
    latents. None: everywhere."""

    training_advice: Callable[[Any], str] = lambda arch: ""
    """One line to warn with when this architecture is trained; empty if there is nothing to say."""

    check_adapter: Callable[[str, Collection[str]], None] = lambda form, modules: None
    """(form of a file, adapted modules by our names): raises UserError if readers of that form would ignore or misread one."""

    adapter_rules: AdapterRules = field(default_factory=AdapterRules)
    """What readers of adapter files want and leave out."""

    verify_export: Callable[[Path, Components, Any, Engine], str] | None = None
    """(adapter file, components, model with that adapter, engine): load the file as a user would (a diffusers pipeline)
    and compare outputs with ours; returns one line that says what was compared, raises UserError on a difference."""

    def keep_fp32(self, name: str) -> bool:
        """Whether the parameter of this name is stored in fp32 whatever the model's dtype: all but the matmuls' are.

        A place in another dtype casts them where it uses them.
        """
        return self.place_of(name) != "matmul"
