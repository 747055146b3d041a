"""A spec of few required fields: what model families share is made of their VAE, their text encoder
and their transformer's inputs."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.families.euler import EulerSampler, classifier_free, shifted_levels
from ditkit_core.families.language_models import TextEncoding
from ditkit_core.families.t5 import T5Encoder, T5Encoding, t5_model
from ditkit_core.families.text import LanguageModelEncoder, text_model
from ditkit_core.families.vae import DiffusersVae, VaeFamily, vae_models
from ditkit_core.families.vision_language import VisionLanguageEncoder
from ditkit_core.models.encoders import AuxiliaryModel, Encoder, Sampler, Streaming, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    AuxiliarySpec,
    DataSpec,
    DemoSpec,
    ModelSpec,
    PrecisionSpec,
    SampleDefaults,
    TrainingSpec,
    lazy,
)

GUIDE = "docs/adding_a_model.md"
STEPS = {
    "import_path": ("spec.py", "5. The spec"),
    "architecture": ("presets.py, model.py and state_dict.py", "2. The transformer"),
    "make_inputs": ("model.py", "2. The transformer"),
    "vae": ("encoders.py", "4. Encoders"),
    "text": ("encoders.py", "4. Encoders"),
    "adapters": ("spec.py", "6. Adapters"),
    "levels": ("spec.py", "5. The spec"),
}
"""Where each required argument of `family_spec` is written: the file of the package, and the
heading of the guide."""


@dataclass(frozen=True, kw_only=True)
class CaptionEncoding:
    """How a model family reads captions with an encoder of its package."""

    num_tokens: int
    """Rows of a caption's features, as plans count them: the most that are usual."""

    encoder: Callable[[ModelPaths, torch.device, torch.dtype, Streaming], Encoder]
    """Makes the encoder, whose items are captions, and loads nothing. `T5Encoder` and
    `LanguageModelEncoder` are such."""

    model: Callable[[int, ModelPaths], AuxiliaryModel]
    """From the width of the features to the encoder as plans count it: as `text_model`."""

    num_slots: Callable[[int, int], int] | None = None
    """From height and width of a reference, at `DataSpec.picture_size`, to the rows that it has among
    the features of its caption. None for an encoder that reads captions alone."""

    divides_text: bool = False
    """As `VisionTower.divides_text`."""


def family_spec(
    *,
    name: str,
    import_path: str = "",
    architecture: ArchitectureSpec | None = None,
    make_inputs: Callable[..., Any] | None = None,
    vae: VaeFamily | None = None,
    text: TextEncoding | T5Encoding | CaptionEncoding | None = None,
    adapters: AdapterSpec | None = None,
    verifier: str = "",
    patch: tuple[int, int, int] = (1, 1, 1),
    text_in_stream: bool = True,
    size: tuple[int, int, int] = (1, 1024, 1024),
    fps: float = 1.0,
    fps_is_fixed: bool = False,
    shift: float | Callable[[Tensor], float] = 1.0,
    levels: Callable[[int, int, float], Tensor] | None = None,
    sample_defaults: Callable[[Any], SampleDefaults] = lambda arch: SampleDefaults(),
    guide: Callable[[Tensor, Tensor, float], Tensor] = classifier_free,
    sampler: Callable[..., Sampler] = EulerSampler,
    latent_channels: Callable[[Any], int] = lambda arch: arch.in_channels,
    text_shape: Callable[[Any], tuple[int, int]] | None = None,
    reference_size: Callable[[int, int, int], tuple[int, int]] | None = None,
    picture_size: Callable[[int, int, int], tuple[int, int]] | None = None,
    needs_references: bool = False,
    advice: Callable[[Any], str] = lambda arch: "",
    full_refusal: Callable[[Any], str] = lambda arch: "",
    precision: PrecisionSpec | None = None,
) -> ModelSpec:
    """The spec of a family whose VAE and text encoder are libraries'. What it makes can be replaced
    with `dataclasses.replace`.

    Six arguments are required, and `levels` where the shift is no constant (`STEPS`). The error for
    a missing one names the file and the step of the guide where it is written.

    Args:
        name: Name of the family, and prefix of its commands.
        import_path: `ditkit_name.spec:NAME`: where another process finds this spec. Its package has
            the folder `demo`.
        architecture: Sizes, the transformer, and names in files.
        make_inputs: As `TrainingSpec.make_inputs`, in training and in sampling.
        vae: The VAE in diffusers.
        text: The text encoder: language models or T5 and its kin in transformers, or an encoder of
            the package.
        adapters: Targets and rules.
        verifier: Import path of the package's `DiffusersModel`, which then verifies exports:
            `ditkit_name.verify:DIFFUSERS`.
        patch: Latent frames, rows and columns that become one token.
        text_in_stream: Whether rows of text are tokens of the blocks' stream, and not only attended
            to by them.
        size: Default frames, height and width. One frame: the model makes images, with a VAE of
            images or of videos.
        fps: Frame rate that the model was trained at.
        fps_is_fixed: As `DataSpec.fps_is_fixed`.
        shift: Shift of noise levels in training, a constant or from the latents. A constant is the
            shift in sampling too.
        levels: Noise levels in sampling, from (latent pixels, steps, shift or 0 for the authors').
            None: equal steps with the constant shift.
        sample_defaults: From architecture to the authors' sampling settings.
        guide: Combines the velocities of the prompt and of the negative prompt.
        sampler: Makes the sampler, from the arguments of `EulerSampler`.
        latent_channels: From architecture to the channels of its latents.
        text_shape: From architecture to rows and columns of a caption's features as plans count
            them. None: the encoding's number of tokens, and `text_dim` of the architecture.
        reference_size: As `DataSpec.reference_size`.
        picture_size: As `DataSpec.picture_size`.
        needs_references: As `DataSpec.needs_references`.
        advice: As `TrainingSpec.advice`.
        full_refusal: As `TrainingSpec.full_refusal`.
        precision: Operation groups of parameters; None: by their usual names.

    Raises:
        UserError: If a required argument is missing; it names the file and the heading of the
            guide.
    """
    required = {
        "import_path": import_path,
        "architecture": architecture,
        "make_inputs": make_inputs,
        "vae": vae,
        "text": text,
        "adapters": adapters,
    }
    for argument, value in required.items():
        if not value:
            raise missing(name, argument)
    assert architecture and make_inputs and vae and text and adapters
    _, frame_stride, pixel_stride = vae.latent_size({})
    constant = 0.0 if callable(shift) else float(shift)
    if levels is None and not constant:
        raise missing(name, "levels")

    def noise_levels(pixels: int, steps: int, shift: float) -> Tensor:
        return shifted_levels(steps, shift or constant)

    captions = _caption_encoding(text)
    if (captions.num_slots is None) != (picture_size is None):
        raise UserError(
            f"the spec of {name} has {'no ' * (picture_size is None)}picture_size, and its text "
            f"encoder {'reads captions alone' if captions.num_slots is None else 'sees references'}: "
            f"give family_spec the size that it sees them at, or leave both out ({GUIDE}, "
            f"{STEPS['text'][1]})"
        )

    def rows_and_columns(arch: Any) -> tuple[int, int]:
        return (captions.num_tokens, arch.text_dim) if text_shape is None else text_shape(arch)

    def item_shapes(
        arch: Any, clip: tuple[int, int, int], references: Sequence[tuple[int, int]] = ()
    ) -> dict[str, Tensor]:
        def latents(frames: int, height: int, width: int) -> Tensor:
            rows, columns = height // pixel_stride, width // pixel_stride
            return torch.empty(
                latent_channels(arch), 1 + (frames - 1) // frame_stride, rows, columns
            )

        others = {
            f"reference.{index}": latents(1, *sides) for index, sides in enumerate(references)
        }
        rows, columns = rows_and_columns(arch)
        if captions.divides_text:  # the words of a picture are in front of it
            before = torch.empty(1, columns, dtype=torch.bfloat16)
            others |= {f"text.{index}": before for index in range(len(references))}
        elif captions.num_slots is not None and picture_size is not None:
            sizes = (picture_size(*sides, len(references)) for sides in references)
            rows += sum(captions.num_slots(*size) for size in sizes)
        features = torch.empty(rows, columns, dtype=torch.bfloat16)
        return {"latents": latents(*clip), "text": features, **others}

    def num_tokens(item: Mapping[str, Tensor]) -> int:
        images = [
            latents
            for key, latents in item.items()
            if key == "latents" or key.startswith("reference.")
        ]
        texts = [x for key, x in item.items() if key == "text" or key.startswith("text.")]
        return sum(map(len, texts)) * text_in_stream + sum(
            prod(latents.shape[1:]) // prod(patch) for latents in images
        )

    def media_encoder(components: ModelPaths, device: torch.device, mode: VaeMode) -> Any:
        return DiffusersVae(vae, components, device, mode)

    def sampler_of(
        components: ModelPaths,
        device: torch.device,
        dtype: torch.dtype,
        decodings: Sequence[VaeMode],
    ) -> Sampler:
        return sampler(
            DiffusersVae(vae, components, device, decodings=decodings),
            device,
            make_inputs=make_inputs,
            sample_defaults=sample_defaults,
            levels=levels or noise_levels,
            guide=guide,
        )

    def models(arch: Any, components: ModelPaths) -> Sequence[AuxiliaryModel]:
        encoder, decoder = vae_models(vae, components, channels=latent_channels(arch))
        return encoder, captions.model(rows_and_columns(arch)[1], components), decoder

    package = import_path.partition(".")[0]
    demo = package_folder(package) / "demo"
    if verifier and adapters.verify is None:
        adapters = replace(
            adapters,
            verify=lazy(f"{verifier}.verify"),
            verify_whole=lazy(f"{verifier}.verify_whole"),
        )
    return ModelSpec(
        name=name,
        architecture=architecture,
        precision=precision or PrecisionSpec(),
        training=TrainingSpec(
            make_inputs=make_inputs,
            empty_item=item_shapes,
            num_tokens=num_tokens,
            shift=shift if callable(shift) else lambda latents: constant,
            advice=advice,
            full_refusal=full_refusal,
        ),
        data=DataSpec(
            frame_step=frame_stride if vae.is_video and size[0] > 1 else 0,
            size_step=pixel_stride * patch[1],
            fps=fps,
            fps_is_fixed=fps_is_fixed,
            size=size,
            reference_size=reference_size,
            picture_size=picture_size,
            needs_references=needs_references,
        ),
        auxiliary=AuxiliarySpec(
            media_encoder=media_encoder,
            text_encoder=captions.encoder,
            sampler=sampler_of,
            sample_defaults=sample_defaults,
            models=models,
        ),
        adapters=adapters,
        demo=DemoSpec(
            write=lazy(f"{package}.demo.write:write_demo"),
            config=demo / "demo.toml",
            trained_base=(demo / "base").is_dir(),
        ),
        import_path=import_path,
    )


def _caption_encoding(text: TextEncoding | T5Encoding | CaptionEncoding) -> CaptionEncoding:
    match text:
        case CaptionEncoding():
            return text
        case T5Encoding():
            return CaptionEncoding(
                num_tokens=text.num_tokens,
                encoder=partial(T5Encoder, text),
                model=lambda text_dim, components: t5_model(text, components),
            )
        case TextEncoding():
            vision = text.models[0].vision
            return CaptionEncoding(
                num_tokens=text.usual_tokens - min(model.dropped for model in text.models),
                encoder=partial(VisionLanguageEncoder if text.sees else LanguageModelEncoder, text),
                model=partial(text_model, text),
                num_slots=vision.num_slots if vision else None,
                divides_text=vision is not None and vision.divides_text,
            )


def missing(name: str, argument: str) -> UserError:
    """What an author reads who left out a required argument of `family_spec`."""
    file, heading = STEPS[argument]
    return UserError(
        f"the spec of {name} has no `{argument}`: write it in {file} and give it to family_spec in "
        f"spec.py ({GUIDE}, {heading})"
    )


def package_folder(package: str) -> Path:
    """The folder of an installed package, which is not imported."""
    module = importlib.util.find_spec(package)
    assert module is not None and module.origin is not None, package
    return Path(module.origin).parent
