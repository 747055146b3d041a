"""Conditions of a mirrored or a cropped clip (`data.flip`, `data.crops`): those of the mirrored or
cropped files, for every architecture and conditioner that reads any."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conditions_help import CPU, HEIGHT, WIDTH, controls, encoded_by_one, noise

from ditkit_core.data.media.clip import read_clip, write_image
from ditkit_core.data.media.crop import Crop
from ditkit_core.families.first_frame import own_frame
from ditkit_core.models.conditions import ClipInputs
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.conditioning.columns import columns, conditioners
from ditkit_wan.demo.models import IMAGE_DIM
from ditkit_wan.model.inputs import IN_FRONT
from ditkit_wan.presets import PRESETS

FRAMES = 5
SIZE = {"height": HEIGHT, "width": WIDTH}
VISUAL = {
    "i2v-14b-480p": ["y", "image"],
    "flf2v-14b-720p": ["y", "image"],
    "i2v-a14b": ["y"],
    "ti2v-5b": ["first_frame"],
    "vace-1.3b": ["vace"],
    "fun-v1.1-control-1.3b": ["y", "reference", "image"],
    "fun-v1.1-control-camera-1.3b": ["y", "image"],
    "fun-control-5b": ["y", "first_frame", "reference"],
    "wantodance-14b": ["y", "image", "refimage"],
    "animate-14b": ["y", "pose", "face", "image"],
}
"""Tensors that show something, by preset."""
FREE = {
    "animate-14b": {"face", "image"},
    "fun-v1.1-control-1.3b": {"reference", "image"},
    "fun-control-5b": {"reference"},
    "wantodance-14b": {"refimage"},
}
"""Those that show a subject in a picture of its own."""


def images_of(
    folder: Path, names: list[str], size: dict[str, int], *, is_mirrored: bool
) -> dict[str, str]:
    """An image for each name, all different, and none resized: a filter rounds otherwise from the
    other side."""
    folder.mkdir()
    for number, name in enumerate(names):
        pixels = noise(number, **size)[:, 0]
        write_image(folder / f"{name}.png", pixels.flip(-1) if is_mirrored else pixels)
    return {name: str(folder / f"{name}.png") for name in names}


def inputs_of(files: dict[str, str], **changes: Any) -> ClipInputs:
    """What goes with the clip among some files."""
    others = {name: file for name, file in files.items() if name != "clip"}
    return controls(files["clip"], others, frames=FRAMES, **changes)


def world_of(
    preset: str, vaes: tuple[Path, Path], clip_folder: Path
) -> tuple[Any, tuple[Any, ...], list[str], dict[str, str]]:
    """A tiny model of a preset with its conditioners; names of images, the clip's among them; and
    texts of other columns."""
    arch = replace(
        PRESETS[preset], image_dim=IMAGE_DIM if PRESETS[preset].image_dim else 0, text_dim=32
    )
    if arch.animate:  # faces as high as the clips: see `images_of`
        arch = replace(arch, animate=replace(arch.animate, face_channels=(4, 4, 4, 4)))
        assert arch.animate.face_size == HEIGHT
    vae = vaes[arch.token_times]
    found = conditioners(
        arch, ModelPaths(vae=str(vae), image_encoder=str(clip_folder)), CPU, VaeMode()
    )
    names = [
        "clip",
        *(column.name for column in columns(arch) if column.kind in ("image", "video")),
    ]
    keyframes = {"wantodance_keyframes_mask": str([1] + [0] * (FRAMES - 1))} if arch.music else {}
    return arch, found, names, keyframes


@pytest.fixture(scope="module")
def vaes(checkpoint: Path, vae_2_2_folder: Path) -> tuple[Path, Path]:
    """Of Wan 2.1 and 2.2."""
    return checkpoint / "vae", vae_2_2_folder


@pytest.mark.parametrize("preset", VISUAL)
def test_conditions_are_mirrored_with_their_clip(
    preset: str, vaes: tuple[Path, Path], clip_folder: Path, tmp_path: Path
) -> None:
    _, found, names, keyframes = world_of(preset, vaes, clip_folder)
    stored = images_of(tmp_path / "stored", names, SIZE, is_mirrored=False)
    flipped = images_of(tmp_path / "flipped", names, SIZE, is_mirrored=True)
    seen = []
    for conditioner in found:
        if conditioner.kind in ("music", "camera"):
            continue
        ours, theirs, plain = encoded_by_one(
            conditioner,
            inputs_of(stored | keyframes, is_mirrored=True, **SIZE),
            inputs_of(flipped | keyframes, **SIZE),
            inputs_of(stored | keyframes, **SIZE),
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
            assert not torch.equal(tensor, plain[name]), name
            seen.append(name)
    assert [name for name in seen if name not in IN_FRONT] == VISUAL[preset]


def test_a_frame_of_the_clip_itself_is_mirrored_and_cropped_as_the_clip_is(tmp_path: Path) -> None:
    stored = images_of(tmp_path / "stored", ["clip"], SIZE, is_mirrored=False)
    flipped = images_of(tmp_path / "flipped", ["clip"], SIZE, is_mirrored=True)
    plain, mirrored, theirs = (
        own_frame(given)
        for given in (
            inputs_of(stored, **SIZE),
            inputs_of(stored, is_mirrored=True, **SIZE),
            inputs_of(flipped, **SIZE),
        )
    )
    assert torch.equal(mirrored, theirs) and not torch.equal(mirrored, plain)
    half = {"height": HEIGHT, "width": WIDTH // 2}
    left, right = (own_frame(inputs_of(stored, crop=Crop(across), **half)) for across in (0.0, 1.0))
    assert torch.equal(torch.cat([left, right], -1), plain)


@pytest.mark.parametrize("preset", VISUAL)
def test_conditions_are_cropped_like_their_clip_and_pictures_of_a_subject_are_not(
    preset: str, vaes: tuple[Path, Path], clip_folder: Path, tmp_path: Path
) -> None:
    arch, found, names, keyframes = world_of(preset, vaes, clip_folder)
    wide = {**SIZE, "width": 2 * WIDTH}
    stored = images_of(tmp_path / "stored", names, wide, is_mirrored=False)
    frames = {"clip", "input_image", "end_image"}
    frames |= {column.name for column in columns(arch) if column.kind == "video"}
    frames -= {"animate_face_video"}  # cut out of the clip already
    cut = dict(stored)
    for name in frames & stored.keys():
        left = read_clip(Path(stored[name]), frames=1, fps=0.0, crop=Crop(0.0, 0.5), **SIZE)
        cut[name] = str(tmp_path / f"{name}.png")
        write_image(Path(cut[name]), left[:, 0] / 2 + 0.5)
    moved = set()
    for conditioner in found:
        if conditioner.kind in ("music", "camera"):
            continue
        ours, theirs, plain = encoded_by_one(
            conditioner,
            inputs_of(stored | keyframes, crop=Crop(0.0, 0.5), **SIZE),
            inputs_of(cut | keyframes, **SIZE),
            inputs_of(stored | keyframes, **SIZE),
        )
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
            moved |= {name} if not torch.equal(tensor, plain[name]) else set()
    assert moved - {*IN_FRONT} == {*VISUAL[preset]} - FREE.get(preset, set())
