"""The model's inputs, and how they are made of noised latents and training items."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import first_frame_of
from ditkit_wan.conditioning.camera import rays
from ditkit_wan.model.variants.animate import check_animate
from ditkit_wan.model.variants.camera_adapter import check_cameras
from ditkit_wan.model.variants.music import check_music
from ditkit_wan.model.variants.reference_conv import check_references
from ditkit_wan.model.variants.speech import MOTION_LATENTS, check_speech, motion_tokens
from ditkit_wan.presets import PATCH, WanArch

IN_FRONT = ("vace_reference", "animate_reference")
"""Conditions that are latent frames in front of the clip, and trained and sampled like these."""


class WanInputs(NamedTuple):
    """The model's inputs: one entry per sample; samples may differ in size. None if no sample has
    an entry."""

    latents: Sequence[Tensor]
    """[channels, frames, height, width] each."""
    timestep: Float[Tensor, " batch *tokens"]
    """1000 · σ, fp32 or wider: one per sample, or one per token, or two per sample with `late` as
    the choice of each token."""
    text: Sequence[Tensor]
    """[rows, text_dim] each, at most `text_tokens` rows."""
    late: Bool[Tensor, "batch tokens"] | None = None
    """Tokens with the second of their sample's two timesteps; None if there is one timestep."""
    y: Sequence[Tensor] | None = None
    """[more channels, frames, height, width] each: channels that the patch embedding takes after
    the noised latents, without noise."""
    image: Sequence[Tensor] | None = None
    """[rows, image_dim] each: CLIP tokens of images, equally many in all samples."""
    vace: Sequence[Tensor] | None = None
    """[vace_channels, frames, height, width] each, on the grid of the latents."""
    reference: Sequence[Tensor | None] | None = None
    """[16 or 48, 1, height, width] each: latents of an image of the clip's subject; None for
    samples without one."""
    camera: Sequence[Tensor | None] | None = None
    """[camera_channels, frames, stride · height, stride · width] each: rays of the clip's pixels;
    None for samples without a camera."""
    music: Sequence[Tensor] | None = None
    """[rows, features] each, 30 rows per second, so their number per frame gives the frame rate."""
    refimage: Sequence[Tensor] | None = None
    """[rows, image_dim] each: CLIP tokens of the dancer's image for WanToDance."""
    audio: Sequence[Tensor] | None = None
    """[states, features, rows] each: hidden states of wav2vec2 for S2V, four rows per latent
    frame."""
    pose: Sequence[Tensor | None] | None = None
    """[pose_channels, frames, height, width] each: latents of a video of the clip's poses; None for
    samples without one. Animate has one frame fewer."""
    motion: Sequence[Tensor | None] | None = None
    """[channels, frames, height, width] each: latents of the frames before the clip; None for
    samples without any."""
    face: Sequence[Tensor] | None = None
    """[3, frames, size, size] each: pixels in [-1, 1] of a face at each frame of the clip, for
    Animate."""
    skips: bool = False
    """Whether WanToDance skips a block, as for the negative side of guidance."""


def make_inputs(
    noised: Sequence[Tensor],
    sigma: Tensor,
    items: Sequence[Mapping[str, Tensor]],
    guidance: float,
    *,
    latent_stride: int = 8,
) -> WanInputs:
    """Make the model's inputs of noised latents, noise levels and training items.

    A sample's `first_frame` replaces its first latent frame without noise, and these tokens have t
    = 0.

    Args:
        noised: [channels, frames, height, width] of each sample.
        sigma: Noise levels, fp32 [batch].
        items: Training items. All have the same conditions, except for `first_frame`, `reference`,
            `camera_path`, `pose` and `motion`.
        guidance: Unused: Wan has no embedding of it.
        latent_stride: Pixels per row or column of latents, for the rays of cameras.

    Raises:
        UserError: If some samples have a condition that others lack.
    """
    device = noised[0].device

    def tensors_of(name: str) -> list[Tensor] | None:
        tensors = [item[name].to(device) for item in items if name in item]
        if tensors and len(tensors) < len(items):
            raise UserError(
                f"{len(tensors)} of {len(items)} samples of a batch have {name!r}: give it to all "
                f"or to none"
            )
        return tensors or None

    def some(name: str) -> list[Tensor | None] | None:
        tensors = [item[name].to(device) if name in item else None for item in items]
        return tensors if any(name in item for item in items) else None

    text = tensors_of("text")
    assert text is not None, "the core encodes a caption for every sample"
    firsts = [first_frame_of(item, x) for item, x in zip(items, noised, strict=True)]
    pairs = list(zip(noised, firsts, strict=True))
    timestep, late = _timesteps(1000 * sigma, [(x.shape, first is not None) for x, first in pairs])
    return WanInputs(
        latents=[
            x if first is None else torch.cat([first.to(x), x[:, 1:]], 1) for x, first in pairs
        ],
        timestep=timestep,
        text=text,
        late=late,
        y=tensors_of("y"),
        image=tensors_of("image"),
        vace=tensors_of("vace"),
        reference=some("reference"),
        camera=_rays(some("camera_path"), noised, latent_stride),
        music=tensors_of("music"),
        refimage=tensors_of("refimage"),
        audio=tensors_of("audio"),
        pose=some("pose"),
        motion=some("motion"),
        face=_pixels(tensors_of("face")),
    )


def _pixels(faces: Sequence[Tensor] | None) -> list[Tensor] | None:
    """Pixels in [-1, 1] of bytes, as which the cache has them: a clip's are a quarter as large."""
    if faces is None:
        return None
    return [face if face.is_floating_point() else face.float() / 127.5 - 1 for face in faces]


def _rays(
    paths: Sequence[Tensor | None] | None, latents: Sequence[Tensor], stride: int
) -> list[Tensor | None] | None:
    """Rays of every clip's pixels, computed from the path of its camera."""
    if paths is None:
        return None
    sizes = [tuple(stride * size for size in clip.shape[2:]) for clip in latents]
    pairs = zip(paths, sizes, strict=True)
    return [
        None if path is None else rays(path, height=height, width=width)
        for path, (height, width) in pairs
    ]


def _timesteps(
    t: Float[Tensor, " batch"], samples: Sequence[tuple[Sequence[int], bool]]
) -> tuple[Float[Tensor, " batch *two"], Bool[Tensor, "batch tokens"] | None]:
    """One timestep per sample; if a sample has a clean first frame, 0 and the timestep, and a mask
    of the tokens with the second.

    Modulation then has two rows per sample; a row per token would take gigabytes.
    """
    if not any(starts_clean for _, starts_clean in samples):
        return t, None
    late = torch.ones(
        len(t), max(_num_tokens(shape) for shape, _ in samples), dtype=torch.bool, device=t.device
    )
    for row, (shape, starts_clean) in zip(late, samples, strict=True):
        if starts_clean:
            row[: _num_tokens(shape) // shape[1]] = False
    return torch.stack([torch.zeros_like(t), t], 1), late


def _num_tokens(shape: Sequence[int]) -> int:
    """Number of tokens of latents [channels, frames, height, width]."""
    return math.prod(shape[1:]) // math.prod(PATCH)


def num_tokens(item: Mapping[str, Tensor]) -> int:
    """Number of tokens of an item in the blocks."""
    before = motion_tokens(*item["motion"].shape[2:]) if "motion" in item else 0
    return before + sum(
        _num_tokens(item[name].shape) for name in ("latents", "reference") if name in item
    )


def assemble(item: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A training item of a sample's cached tensors.

    VACE's reference images and Animate's become frames in front of the clip. S2V's clip loses its
    first frame, which is where the model starts; latents that were encoded with the frames before
    it replace it.
    """
    assembled = dict(item)
    if "audio" in assembled:
        assembled["latents"] = assembled.pop("continued", assembled["latents"][:, 1:])
    for name in IN_FRONT:
        references = assembled.pop(name, None)
        if references is not None:
            assembled["latents"] = torch.cat(
                [references.to(assembled["latents"]), assembled["latents"]], 1
            )
    return assembled


def check_conditions(arch: WanArch, inputs: WanInputs) -> None:
    """Refuse samples that lack a condition of the architecture, or have another one.

    Raises:
        UserError: If so; the message names the condition.
    """
    needed = {
        "y": arch.in_channels > arch.out_channels,
        "image": arch.image_dim > 0,
        "vace": bool(arch.vace_layers),
        "music": arch.music is not None,
        "audio": arch.speech is not None,
        "face": arch.animate is not None,
    }
    has_speech = arch.speech is not None
    optional = {
        "reference": arch.ref_conv or has_speech,
        "pose": has_speech or arch.animate is not None,
        "motion": has_speech,
        "camera": arch.camera_channels > 0,
        "refimage": arch.music is not None,
    }
    for name, takes in (needed | optional).items():
        values: Sequence[Tensor | None] | None = getattr(inputs, name)
        if takes and values is None and name in needed:
            raise UserError(
                f"this model is conditioned on {name!r}, and the samples have none; encode them "
                f"for it"
            )
        if values is not None and not takes:
            raise UserError(
                f"the samples have {name!r}, and this model takes none; leave that column out"
            )
    if inputs.late is not None and not arch.token_times:
        raise UserError(
            "the samples have 'first_frame', and this model takes none; leave that column out"
        )
    for y, latents in zip(inputs.y or (), inputs.latents, strict=False):
        if len(y) + len(latents) != arch.in_channels:
            raise UserError(
                f"this model takes {arch.in_channels} channels, and the samples have "
                f"{len(latents)} of latents and {len(y)} of 'y'"
            )
    if has_speech:
        check_speech(inputs.audio or (), inputs.reference, inputs.pose or (), inputs.latents)
    check_references(arch, inputs.reference or (), inputs.latents)
    check_cameras(arch, inputs.camera or (), inputs.latents)
    check_music(inputs.music or (), inputs.latents)
    check_animate(arch, inputs.face or (), inputs.pose, inputs.latents)


def empty_item(
    arch: WanArch, size: tuple[int, int, int], references: Sequence[tuple[int, int]] = ()
) -> dict[str, Tensor]:
    """An empty training item of a clip of (frames, height, width) with all conditions of the
    architecture.

    References are VACE's: each is a latent frame in front of the clip.
    """
    frames, height, width = size
    in_front = len(references) if arch.vace_layers else int(arch.animate is not None)
    grid = (
        in_front + 1 + (frames - 1) // 4,
        height // arch.latent_stride,
        width // arch.latent_stride,
    )
    item = {
        "latents": torch.empty(arch.out_channels, *grid),
        "text": torch.empty(arch.text_tokens, arch.text_dim, dtype=torch.bfloat16),
    }
    if arch.in_channels > arch.out_channels:
        item["y"] = torch.empty(arch.in_channels - arch.out_channels, *grid)
    if arch.image_dim:
        item["image"] = torch.empty(arch.image_tokens, arch.image_dim, dtype=torch.bfloat16)
    if arch.vace_layers:
        item["vace"] = torch.empty(arch.vace_channels, *grid)
    if arch.camera_channels:
        item["camera_path"] = torch.empty(frames, 16)
    if arch.speech:
        item["latents"] = torch.empty(arch.out_channels, grid[0] - 1, *grid[1:])
        item["audio"] = torch.empty(arch.speech.states, arch.speech.features, 4 * (grid[0] - 1))
        item["reference"] = torch.empty(arch.reference_channels, 1, *grid[1:])
        item["pose"] = torch.empty(arch.speech.pose_channels, grid[0] - 1, *grid[1:])
        item["motion"] = torch.empty(arch.out_channels, MOTION_LATENTS, *grid[1:])
    if arch.animate:
        size_of_face = (arch.animate.face_size, arch.animate.face_size)
        item["pose"] = torch.empty(arch.animate.pose_channels, grid[0] - 1, *grid[1:])
        item["face"] = torch.empty(3, frames, *size_of_face, dtype=torch.uint8)
    if arch.music:
        item["music"] = torch.empty(round(frames * 30 / arch.music.fps), arch.music.features)
        item["refimage"] = torch.empty(arch.image_tokens, arch.image_dim, dtype=torch.bfloat16)
    elif arch.ref_conv:
        item["reference"] = torch.empty(arch.reference_channels, 1, *grid[1:])
    if arch.token_times and frames > 1:
        item["first_frame"] = torch.empty(arch.out_channels, 1, *grid[1:])
    return item
