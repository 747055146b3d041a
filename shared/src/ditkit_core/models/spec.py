"""The description of a model family for the core: groups of plain values and functions, without a
base class."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor

from ditkit_core.models.adapter_programs import AdapterRules
from ditkit_core.models.conditions import Column, Conditioner
from ditkit_core.models.encoders import AuxiliaryModel, Encoder, Sampler, Streaming, VaeMode
from ditkit_core.models.meta import on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.models.token_streams import TokenStreams


def lazy(import_path: str) -> Callable[..., Any]:
    """A function or class (`module:name`, or `module:object.method`) that is imported when it is
    called.

    Encoders and samplers need diffusers and transformers, which take seconds.
    """
    return lambda *args, **kwargs: resolve_name(import_path)(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class SampleDefaults:
    """The sampling settings of an architecture's authors."""

    steps: int = 50
    guidance: float = 4.0
    negative: str = ""
    guided_by: Literal["negative", "embedding", "nothing"] = "negative"
    """How guidance works. `negative`: with a strength above 1 the model is called a second time in
    each step, with the negative prompt. `embedding`: the strength is an input of the model.
    `nothing`: a distilled model ignores guidance."""
    shift: float = 0.0
    """Shift of the noise levels, where an architecture has another one than its family; 0: the
    family's."""


@dataclass(frozen=True, kw_only=True)
class Expert:
    """One of several transformers, each for a range of noise levels; each is trained separately."""

    name: str
    """`high_noise`, `low_noise`: part of the names of folders and files."""
    part: str
    """Name of the component: `transformer` or `transformer_2`."""
    min_sigma: float
    """Lowest noise level of its range, in [0, 1)."""
    max_sigma: float
    """Upper end of its range, exclusive; for the noisiest expert 1, inclusive."""
    guidance: float
    """Guidance strength that its authors sample with."""


def identity(item: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A training item as it is stored in the cache."""
    return dict(item)


@dataclass(frozen=True, kw_only=True)
class ArchitectureSpec:
    """The architectures of a family, how they are built, and how files name their parameters."""

    presets: Mapping[str, Any]
    """From preset name to architecture (a frozen dataclass)."""

    hub_presets: Mapping[str, str] = field(default_factory=dict)
    """From the hub id of a published model, or of its transformer, to its preset: known without
    asking the hub."""

    build: Callable[[Any, Precision], Any]
    """From architecture and precision to a StagedModel, on the default device (the core builds on
    `meta`)."""

    names: StateDictNames

    infer_arch: Callable[[Mapping[str, Any], Mapping[str, Any]], Any | None] | None = None
    """From a diffusers `transformer/config.json` and the pipeline's `model_index.json` (empty if
    there is none) to the architecture. Returns None if the form of the config is unknown, so that
    the shapes of the weights decide; raises KeyError for another model's config."""

    experts: Callable[[Any], Sequence[Expert]] = lambda arch: ()
    """From architecture to its experts, the noisiest first; empty if one transformer covers all
    noise levels."""

    token_streams: Callable[[Any], TokenStreams | None] = lambda arch: None
    """From architecture to what runs along tokens, for `ranks.context`; None if its blocks need all
    tokens of a sample."""


def op_groups_by_name(starts: Mapping[str, str], ends: Mapping[str, str]) -> Callable[[str], str]:
    """A function that gives the operation group of a parameter by the start of its name, then by
    the end; by default `matmul`."""

    def op_group_of(name: str) -> str:
        groups = [group for start, group in starts.items() if name.startswith(start)]
        groups += [group for end, group in ends.items() if name.endswith(end)]
        return groups[0] if groups else "matmul"

    return op_group_of


USUAL_STARTS = {"head.": "head", "embed.time": "time_mlp"}
USUAL_ENDS = {
    **dict.fromkeys(
        (".norm_q.weight", ".norm_k.weight", ".q_norm.weight", ".k_norm.weight"), "qk_norms"
    ),
    **{
        f".{norm}.{leaf}": "norms"
        for norm in ("norm", "norm1", "norm2", "norm3")
        for leaf in ("weight", "bias")
    },
    **{
        f"{modulation}{leaf}": "modulation"
        for modulation in (".modulation", ".adaLN_modulation.1")
        for leaf in ("", ".weight", ".bias")
    },
}
"""The places of parameters whose names start or end so, in most models."""


usual_op_group_of = op_groups_by_name(USUAL_STARTS, USUAL_ENDS)


@dataclass(frozen=True, kw_only=True)
class PrecisionSpec:
    """The places of `Precision` for a family's parameters."""

    op_group_of: Callable[[str], str] = usual_op_group_of
    """From the name of a parameter to its place in `Precision`: `matmul`, `time_mlp`, `modulation`,
    `norms`, `qk_norms` or `head`. By default by usual names."""

    reference: Mapping[str, str] = field(default_factory=dict)
    """The preset `reference` of `[precision]`: for each place whose dtype in the official code
    differs from `default`, the name of that dtype, or `matmul`."""

    def keep_fp32(self, name: str) -> bool:
        """Whether the parameter of this name is stored in fp32 whatever the model's dtype: all
        parameters except the weights of matmuls.

        A place with another dtype casts its parameters when it uses them.
        """
        return self.op_group_of(name) != "matmul"


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """How training items become model inputs and a loss."""

    make_inputs: Callable[[Sequence[Tensor], Tensor, Sequence[Mapping[str, Tensor]], float], Any]
    """From (noised latents per sample, sigma [batch] fp32, training items, guidance) to the model's
    inputs.

    The model's prediction is then a sequence of velocities, one per sample, with the shape of its
    latents. Guidance is the input of a model with a guidance embedding; other models ignore it.
    """

    empty_item: Callable[[Any, tuple[int, int, int], Sequence[tuple[int, int]]], dict[str, Tensor]]
    """From (architecture, (frames, height, width), (height, width) of each reference) to an empty
    training item as in the cache, on the default device; memory plans use it."""

    num_tokens: Callable[[Mapping[str, Tensor]], int]
    """Number of tokens of one training item in the blocks; reads only shapes, so tensors may be on
    `meta`."""

    shift: Callable[[Tensor], float]
    """Noise-level shift for training on latents of this shape; 1 means no shift."""

    assemble: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = identity
    """From a sample's tensors in the cache to its training item; here a condition that is part of
    the latents is inserted."""

    loss_mask: Callable[[Mapping[str, Tensor]], Tensor | None] = lambda item: None
    """From a training item to a mask of its latents, broadcast to them: 1 where the velocity is
    learnt, 0 where the model gets the data as input. None means 1 everywhere."""

    fewest_frames: int = 1
    """Shorter clips are fully covered by the condition, so that almost nothing is left to learn; a
    run warns about them."""

    control_dropout: float = 0.0
    """Default of `train.control_dropout`: fraction of samples that are trained without optional
    conditions, in [0, 1]."""

    advice: Callable[[Any], str] = lambda arch: ""
    """One line to warn with when this architecture is trained without `base.assistant`; empty for
    no warning."""

    full_refusal: Callable[[Any], str] = lambda arch: ""
    """Why not every weight of this architecture can be trained, in one line; empty if it can."""


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Sizes of clips and images that a family takes, and the columns of a dataset that it is
    conditioned on."""

    frame_step: int
    """Clips have 1 + k * frame_step frames; 0 if the model takes still images only."""

    size_step: int
    """Height and width are multiples of this many pixels."""

    fps: float
    """Frame rate that the model was trained at, in frames per second."""

    fps_is_fixed: bool = False
    """Whether the model knows no other rate, as one whose positions are seconds at `fps`; another
    `data.fps` is then refused."""

    size: tuple[int, int, int]
    """Default frames, height and width of training clips and of samples."""

    reference_size: Callable[[int, int, int], tuple[int, int]] | None = None
    """From (height, width, number of references of the sample) of a reference image to the size it
    is encoded at, in pixels; raises UserError for an image that cannot be used. None if the model
    takes no references."""

    picture_size: Callable[[int, int, int], tuple[int, int]] | None = None
    """Likewise the size that the text encoder sees a reference at, of every image that
    `reference_size` accepts. The encoder's items are then each a `Prompt`; None if it reads
    captions alone."""

    needs_references: bool = False
    """Whether the model only edits: a sample without references is refused."""

    shape_reference: int = 0
    """Index of the reference that a sample has the shape of, where no size is asked for: 0 the
    first, -1 the last."""

    columns: Callable[[Any], Sequence[Column]] = lambda arch: ()
    """From architecture to the dataset columns that it is conditioned on."""

    caption_words: tuple[int, int] = (30, 80)
    """Fewest and most words of a usual caption."""


@dataclass(frozen=True, kw_only=True)
class AuxiliarySpec:
    """The models next to the transformer: VAE, text and image encoders, conditioners, the sampler,
    and their memory for plans."""

    media_encoder: Callable[[ModelPaths, torch.device, VaeMode], Encoder]
    """From (files, device, mode) to the VAE as an encoder; its identity depends on the mode."""

    text_encoder: Callable[[ModelPaths, torch.device, torch.dtype, Streaming], Encoder]

    sampler: Callable[[ModelPaths, torch.device, torch.dtype, Sequence[VaeMode]], Sampler]
    """From (files, device, dtype, ways for the VAE to decode, to be tried in this order) to the
    sampler."""

    sample_defaults: Callable[[Any], SampleDefaults]
    """From architecture to its default sampling settings."""

    models: Callable[[Any, ModelPaths], Sequence[AuxiliaryModel]]
    """From architecture and files to the models that a plan counts next to the transformer; for
    missing files, with their published sizes."""

    components: Callable[[Any], Sequence[str]] = lambda arch: ()
    """From architecture to the components that it needs besides transformers, VAE, text encoder and
    tokenizer: `image_encoder`."""

    conditioners: Callable[
        [Any, ModelPaths | None, torch.device, VaeMode], Sequence[Conditioner]
    ] = lambda arch, components, device, mode: ()
    """From (architecture, files, device, mode of the VAE) to the encoders of conditions besides the
    caption. Without files only their `uses` and `check` are called."""


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Adapter targets, rules for adapter files, and the verification of an exported adapter."""

    targets: Mapping[str, tuple[str, ...]]
    """Named sets of adapter targets, as name suffixes of Linear modules; the first set is the
    default."""

    check: Callable[[str, Collection[str]], None] = lambda form, modules: None
    """Called with (form of a file, adapted modules by our names); raises UserError if readers of
    that form would ignore or misread a module."""

    rules: AdapterRules = field(default_factory=AdapterRules)
    """What programs that read adapter files require and ignore."""

    verify: Callable[[Path, ModelPaths, Any, Engine], str] | None = None
    """Called with (adapter file, components, model with that adapter, engine): loads the file as a
    user would (in a diffusers pipeline) and compares outputs with ours. Returns one line about the
    comparison; raises UserError on a difference."""

    verify_whole: Callable[[Path, str, Any, Engine], str] | None = None
    """The same for the folder of a whole transformer, called with (folder, form, model with these
    weights, engine)."""

    whole_unread: Mapping[str, str] = field(default_factory=dict)
    """By form: why diffusers does not load a whole transformer in it, as the predicate of a
    sentence about diffusers."""


@dataclass(frozen=True, kw_only=True)
class DemoSpec:
    """The demo: generated inputs and a run file."""

    write: Callable[[Path], None]
    """Writes generated inputs of the demo (checkpoint, media, captions) into a folder;
    deterministic."""

    config: Path
    """The run file of the demo; relative paths in it are relative to the demo's folder."""

    trained_base: bool
    """Whether the checkpoint that it writes was trained. Samples of random weights are noise before
    training and after it, and a run says so."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything the core needs to train one family."""

    name: str
    """Name of the family, and prefix of its commands: `name` for name-train."""

    architecture: ArchitectureSpec
    precision: PrecisionSpec
    training: TrainingSpec
    data: DataSpec
    auxiliary: AuxiliarySpec
    adapters: AdapterSpec
    demo: DemoSpec

    import_path: str = ""
    """`module:name` from which another process imports this spec (for previews on another device);
    empty if none can."""

    variant: Callable[["ModelSpec", Any], "ModelSpec"] = lambda spec, arch: spec
    """From (spec, architecture) to the spec of that architecture, if its sizes, encoders or rules
    differ from the family's."""

    @staticmethod
    def at(import_path: str) -> "ModelSpec":
        """Import the spec with this `import_path`."""
        spec = resolve_name(import_path)
        assert isinstance(spec, ModelSpec), import_path
        return spec

    def for_arch(self, arch: Any) -> "ModelSpec":
        """The spec of one architecture, with its sizes, frame rate, VAE and adapter rules."""
        return self.variant(self, arch)


def build_on_meta(spec: ModelSpec, arch: Any, precision: Precision) -> Any:
    """A model without memory."""
    with on_meta():
        return spec.architecture.build(arch, precision)
