"""What `embed` takes, and how noised latents and training items become it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_wan.conditioning.camera import rays
from ditkit_wan.model.variants.camera_adapter import check_cameras
from ditkit_wan.model.variants.music import check_music
from ditkit_wan.model.variants.reference_conv import check_references
from ditkit_wan.presets import PATCH, WanArch


class WanInputs(NamedTuple):
    """What `embed` takes: one entry per sample, which may differ in size; None where no sample has any."""

    latents: Sequence[Tensor]
    """[channels, frames, height, width] each."""
    timestep: Float[Tensor, "batch *tokens"]
    """1000 · σ, fp32 or wider: one per sample, or one per token; or two per sample, of which `late` says which a token has."""
    text: Sequence[Tensor]
    """[rows, text_dim] each, at most `text_tokens` rows."""
    late: Bool[Tensor, "batch tokens"] | None = None
    """Which tokens have the second of their sample's two timesteps; None where there are not two."""
    y: Sequence[Tensor] | None = None
    """[more channels, frames, height, width] each: what the patch embedding takes behind the noised latents, as it is."""
    image: Sequence[Tensor] | None = None
    """[rows, image_dim] each: features of pictures, equally many in all."""
    vace: Sequence[Tensor] | None = None
    """[vace_channels, frames, height, width] each, on the grid of the latents."""
    reference: Sequence[Tensor | None] | None = None
    """[16, 1, height, width] each: a picture of what the clip shows, which not every sample has."""
    camera: Sequence[Tensor | None] | None = None
    """[camera_channels, frames, 8 · height, 8 · width] each: rays of the clip's pixels, which not every sample has."""
    music: Sequence[Tensor] | None = None
    """[rows, features] each, 30 rows a second: how many there are for a clip's frames says its frame rate."""
    refimage: Sequence[Tensor] | None = None
    """[rows, image_dim] each: features of the picture that WanToDance dances as."""
    skips: bool = False
    """Whether WanToDance leaves out a block, as for the negative side of guidance."""


def make_inputs(
    noised: Sequence[Tensor], sigma: Tensor, items: Sequence[Mapping[str, Tensor]], guidance: float
) -> WanInputs:
    """Noised latents, their noise levels and what goes with them, as the model takes them.

    A sample with `first_frame` has it, clean, in place of its first latent frame, whose tokens are told t = 0.

    Args:
        noised: [channels, frames, height, width] of each sample.
        sigma: fp32 [batch].
        items: Training items; of conditions other than `first_frame`, `reference` and `camera_path`, all have the same.
        guidance: Wan has no embedding of it.

    Raises:
        UserError: If some samples have a condition that others lack.
    """
    device = noised[0].device

    def each(name: str) -> list[Tensor] | None:
        found = [item[name].to(device) for item in items if name in item]
        if found and len(found) < len(items):
            raise UserError(f"{len(found)} of {len(items)} samples of a batch have {name!r}: give it to all or to none")
        return found or None

    def some(name: str) -> list[Tensor | None] | None:
        found = [item[name].to(device) if name in item else None for item in items]
        return found if any(name in item for item in items) else None

    text = each("text")
    assert text is not None, "the core encodes a caption for every sample"
    firsts = [_first_frame(item, x) for item, x in zip(items, noised, strict=True)]
    pairs = list(zip(noised, firsts, strict=True))
    timestep, late = _timesteps(1000 * sigma, [(x.shape, first is not None) for x, first in pairs])
    return WanInputs(
        latents=[x if first is None else torch.cat([first.to(x), x[:, 1:]], 1) for x, first in pairs],
        timestep=timestep,
        text=text,
        late=late,
        y=each("y"),
        image=each("image"),
        vace=each("vace"),
        reference=some("reference"),
        camera=_rays(some("camera_path"), noised),
        music=each("music"),
        refimage=each("refimage"),
    )


def _rays(paths: Sequence[Tensor | None] | None, latents: Sequence[Tensor]) -> list[Tensor | None] | None:
    """Rays of every clip's pixels by the path of its camera."""
    if paths is None:
        return None
    sizes = [tuple(8 * size for size in clip.shape[2:]) for clip in latents]
    pairs = zip(paths, sizes, strict=True)
    return [None if path is None else rays(path, height=height, width=width) for path, (height, width) in pairs]


def _first_frame(item: Mapping[str, Tensor], latents: Tensor) -> Float[Tensor, "channels 1 height width"] | None:
    """The latents of the picture that a sample starts with, if it has one; a still has nothing after it to learn, and starts with none."""
    return item.get("first_frame") if latents.shape[1] > 1 else None


def _timesteps(
    t: Float[Tensor, " batch"], samples: Sequence[tuple[Sequence[int], bool]]
) -> tuple[Float[Tensor, "batch *two"], Bool[Tensor, "batch tokens"] | None]:
    """One timestep per sample; or, if a sample has a clean first frame, 0 and that, and which tokens have the second.

    Modulation then stays two rows per sample: a row for each token would be gigabytes.
    """
    if not any(starts_clean for _, starts_clean in samples):
        return t, None
    late = torch.ones(len(t), max(_num_tokens(shape) for shape, _ in samples), dtype=torch.bool, device=t.device)
    for row, (shape, starts_clean) in zip(late, samples, strict=True):
        if starts_clean:
            row[: _num_tokens(shape) // shape[1]] = False
    return torch.stack([torch.zeros_like(t), t], 1), late


def _num_tokens(shape: Sequence[int]) -> int:
    """Tokens of latents [channels, frames, height, width]."""
    return math.prod(shape[1:]) // math.prod(PATCH)


def num_tokens(item: Mapping[str, Tensor]) -> int:
    """Tokens that an item is in the blocks."""
    return sum(_num_tokens(item[name].shape) for name in ("latents", "reference") if name in item)


def loss_mask(item: Mapping[str, Tensor]) -> Float[Tensor, "1 frames 1 1"] | None:
    """1 where the velocity is learnt: everywhere but in a first frame that is given."""
    latents = item["latents"]
    if _first_frame(item, latents) is None:
        return None
    return F.pad(latents.new_ones(1, latents.shape[1] - 1, 1, 1, dtype=torch.float32), (0, 0, 0, 0, 1, 0))


def assemble(item: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A training item of what the cache holds of a sample: VACE's reference pictures are frames in front of the clip's."""
    made = dict(item)
    references = made.pop("vace_reference", None)
    if references is not None:
        made["latents"] = torch.cat([references.to(made["latents"]), made["latents"]], 1)
    return made


def check_conditions(arch: WanArch, inputs: WanInputs) -> None:
    """Refuse samples that lack what the architecture is conditioned on, or have more.

    Raises:
        UserError: Naming the condition.
    """
    needed = {
        "y": arch.in_channels > arch.out_channels, "image": arch.image_dim > 0, "vace": bool(arch.vace_layers),
        "music": arch.music is not None,
    }  # fmt: skip
    optional = {"reference": arch.ref_conv, "camera": arch.camera_channels > 0, "refimage": arch.music is not None}
    for name, takes in (needed | optional).items():
        given: Sequence[Tensor | None] | None = getattr(inputs, name)
        if takes and given is None and name in needed:
            raise UserError(f"this model is conditioned on {name!r}, and the samples have none; encode them for it")
        if given is not None and not takes:
            raise UserError(f"the samples have {name!r}, and this model takes none; leave that column out")
    if inputs.late is not None and not arch.token_times:
        raise UserError("the samples have 'first_frame', and this model takes none; leave that column out")
    for y, latents in zip(inputs.y or (), inputs.latents, strict=False):
        if len(y) + len(latents) != arch.in_channels:
            raise UserError(
                f"this model takes {arch.in_channels} channels, and the samples have {len(latents)} of latents and {len(y)} of 'y'"
            )
    check_references(inputs.reference or (), inputs.latents)
    check_cameras(inputs.camera or (), inputs.latents)
    check_music(inputs.music or (), inputs.latents)


def empty_item(
    arch: WanArch, size: tuple[int, int, int], references: Sequence[tuple[int, int]] = ()
) -> dict[str, Tensor]:
    """An empty training item of a clip of (frames, height, width) with everything that the architecture is conditioned on.

    References are VACE's: each is a latent frame in front of the clip's.
    """
    frames, height, width = size
    in_front = len(references) if arch.vace_layers else 0
    grid = (in_front + 1 + (frames - 1) // 4, height // arch.latent_stride, width // arch.latent_stride)
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
    if arch.music:
        item["music"] = torch.empty(round(frames * 30 / arch.music.fps), arch.music.features)
        item["refimage"] = torch.empty(arch.image_tokens, arch.image_dim, dtype=torch.bfloat16)
    elif arch.ref_conv:
        item["reference"] = torch.empty(16, 1, *grid[1:])
    if arch.token_times and frames > 1:
        item["first_frame"] = torch.empty(arch.out_channels, 1, *grid[1:])
    return item
