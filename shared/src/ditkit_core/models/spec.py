"""What a model family is to the core: plain values and functions in groups, no base class."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ditkit_core.models.adapter_formats import AdapterRules
from ditkit_core.models.conditions import Column, Conditioner
from ditkit_core.models.encoders import AuxiliaryModel, Encoder, Sampler, Streaming
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine
from ditkit_core.models.state_dict import StateDictNames


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


def identity(item: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A training item as the cache holds it."""
    return dict(item)


@dataclass(frozen=True, kw_only=True)
class ArchitectureSpec:
    """Which architectures a family has, how each is built, and how files name its parameters."""

    presets: Mapping[str, Any]
    """Preset name to architecture (a frozen dataclass)."""

    build: Callable[[Any, Precision], Any]
    """Architecture and precision to a StagedModel, on the default device (the core builds on `meta`)."""

    names: StateDictNames

    infer_arch: Callable[[Mapping[str, Any], Mapping[str, Any]], Any | None] | None = None
    """A diffusers `transformer/config.json`, and the pipeline's `model_index.json` (empty if there is none), to the
    architecture; None where it is in a form that is not read, so that the weights' shapes decide; raises KeyError where it is another model's."""

    experts: Callable[[Any], Sequence[Expert]] = lambda arch: ()
    """Architecture to its experts, the noisiest first; none where one transformer sees all noise levels."""


def op_groups_by_name(starts: Mapping[str, str], ends: Mapping[str, str]) -> Callable[[str], str]:
    """The operation group of a parameter by how its name begins, then by how it ends; all others are the matmuls'."""

    def op_group_of(name: str) -> str:
        found = [group for start, group in starts.items() if name.startswith(start)]
        found += [group for end, group in ends.items() if name.endswith(end)]
        return found[0] if found else "matmul"

    return op_group_of


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """Which places of `Precision` a family's parameters compute in."""

    op_group_of: Callable[[str], str]
    """The place of `Precision` that the parameter of this name computes in: `matmul`, `time_mlp`, `modulation`, `norms`, `qk_norms` or
    `head`."""

    reference: Mapping[str, str] = field(default_factory=dict)
    """The preset `reference` of `precision`: the places that the official code runs in other dtypes than `default`, each to the name of a
    dtype, or to `matmul`."""

    def keep_fp32(self, name: str) -> bool:
        """Whether the parameter of this name is stored in fp32 whatever the model's dtype: all but the matmuls' are.

        A place in another dtype casts them where it uses them.
        """
        return self.op_group_of(name) != "matmul"


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """How training items become inputs and a loss."""

    make_inputs: Callable[[Sequence[Tensor], Tensor, Sequence[Mapping[str, Tensor]], float], Any]
    """(noised latents per sample, sigma [batch] fp32, training items, guidance) to the model's inputs.

    The model's prediction is then a sequence of velocities, one per sample, shaped like its latents. Guidance is the value that a
    model with an embedding of it is given; others leave it.
    """

    empty_item: Callable[[Any, tuple[int, int, int], Sequence[tuple[int, int]]], dict[str, Tensor]]
    """(architecture, (frames, height, width), (height, width) of each reference) to an empty training item as the cache would have it,
    on the default device: what a plan is made for."""

    num_tokens: Callable[[Mapping[str, Tensor]], int]
    """Tokens that one training item is in the blocks; only shapes are read, which may be on `meta`."""

    shift: Callable[[Tensor], float]
    """Noise-level shift that the model is trained with on latents of this shape; 1 shifts nothing."""

    assemble: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = identity
    """What the cache holds of a sample to its training item: where a condition is part of the latents, this puts it there."""

    loss_mask: Callable[[Mapping[str, Tensor]], Tensor | None] = lambda item: None
    """A training item to what of its latents is learnt: 1 where the velocity is, 0 where the model is given the data; broadcast to the
    latents. None: everywhere."""

    fewest_frames: int = 1
    """Clips of fewer frames are fully covered by the condition, so there is next to nothing left to learn; they are warned of."""

    control_dropout: float = 0.0
    """Share of samples that are trained without the conditions that are optional, unless `train.control_dropout` says otherwise."""

    advice: Callable[[Any], str] = lambda arch: ""
    """One line to warn with when this architecture is trained; empty if there is nothing to say."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Sizes of clips and images that a family takes, and the columns of a dataset that it is conditioned on."""

    frame_step: int
    """Clips have 1 + k * frame_step frames; 0: the model knows still images alone."""

    size_step: int
    """Height and width are multiples of this many pixels."""

    fps: float
    """Frame rate that the model was trained at, in frames per second."""

    size: tuple[int, int, int]
    """Frames, height and width of training and of samples, unless the configuration says otherwise."""

    reference_size: Callable[[int, int, int], tuple[int, int]] | None = None
    """(height, width, how many references the sample has) of a reference image to the size it is encoded at, in pixels; raises
    UserError for one that cannot be used. None: the model takes no references."""

    columns: Callable[[Any], Sequence[Column]] = lambda arch: ()
    """Architecture to the columns of a dataset that it is conditioned on."""


@dataclass(frozen=True, kw_only=True)
class AuxiliarySpec:
    """What runs alongside the transformer: VAE, text and image encoders, conditioners, the sampler, and their memory for plans."""

    media_encoder: Callable[[ModelPaths, torch.device, bool], Encoder]
    """(files, device, whether it works in tiles) to the VAE as an encoder; its identity says whether it does."""

    text_encoder: Callable[[ModelPaths, torch.device, torch.dtype, Streaming], Encoder]

    sampler: Callable[[ModelPaths, torch.device, torch.dtype, bool], Sampler]
    """(files, device, dtype, whether the VAE decodes in tiles) to the sampler."""

    sample_defaults: Callable[[Any], SampleDefaults]
    """Architecture to the settings that its samples are generated with unless the configuration says otherwise."""

    models: Callable[[Any, ModelPaths], Sequence[AuxiliaryModel]]
    """Architecture and files to what a plan counts next to the transformer; of files that are not here, the published sizes."""

    components: Callable[[Any], Sequence[str]] = lambda arch: ()
    """Architecture to the components that it trains with besides transformers, VAE, text encoder and tokenizer: `image_encoder`."""

    conditioners: Callable[[Any, ModelPaths | None, torch.device, bool], Sequence[Conditioner]] = (
        lambda arch, components, device, tiled: ()
    )
    """(architecture, files, device, whether the VAE works in tiles) to what encodes conditions besides clip and caption. Without files they
    are asked for `uses` and `check` alone."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Where adapters sit, what readers of their files make of them, and how an exported one is verified."""

    targets: Mapping[str, tuple[str, ...]]
    """Named sets of adapter targets, as name suffixes of Linear modules; the first is the default."""

    check: Callable[[str, Collection[str]], None] = lambda form, modules: None
    """(form of a file, adapted modules by our names): raises UserError if readers of that form would ignore or misread one."""

    rules: AdapterRules = field(default_factory=AdapterRules)
    """What readers of adapter files want and leave out."""

    verify: Callable[[Path, ModelPaths, Any, Engine], str] | None = None
    """(adapter file, components, model with that adapter, engine): load the file as a user would (a diffusers pipeline)
    and compare outputs with ours; returns one line that says what was compared, raises UserError on a difference."""


@dataclass(frozen=True, kw_only=True)
class DemoSpec:
    """The demo: generated inputs and a run file."""

    write: Callable[[Path], None]
    """Write generated inputs of the demo (checkpoint, media, captions) into a folder; deterministic."""

    config: Path
    """The run file of the demo; relative paths in it start at the demo's folder."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the core needs to train one family."""

    name: str
    """Prefix of the commands: `name` for name-train."""

    architecture: ArchitectureSpec
    precision: PrecisionSpec
    training: TrainingSpec
    data: DataSpec
    auxiliary: AuxiliarySpec
    adapters: AdapterSpec
    demo: DemoSpec

    import_path: str = ""
    """`module:name` of this spec, where a process of its own imports it (previews on another device); empty: none can."""

    variant: Callable[["ModelSpec", Any], "ModelSpec"] = lambda spec, arch: spec
    """(spec, architecture) to the spec of that architecture, where it has other sizes, encoders or rules than its family."""

    def for_arch(self, arch: Any) -> "ModelSpec":
        """The spec of one architecture: sizes, frame rate, which VAE, what readers make of its adapters."""
        return self.variant(self, arch)
