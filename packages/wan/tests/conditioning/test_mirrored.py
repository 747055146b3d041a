"""Conditions of a mirrored clip (`data.flip`): those of the mirrored files, for every architecture
and conditioner that reads any."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conditions_help import CPU, FRAMES, HEIGHT, WIDTH, controls, encoded, noise
from narrow_vae import NARROW_2_2, narrow

from ditkit_core.data.media.clip import write_image
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.conditioning.columns import columns, conditioners
from ditkit_wan.demo.models import IMAGE_DIM
from ditkit_wan.model.inputs import IN_FRONT
from ditkit_wan.presets import PRESETS

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


@pytest.mark.parametrize("preset", VISUAL)
def test_conditions_are_mirrored_with_their_clip(
    preset: str, checkpoint: Path, clip_folder: Path, tmp_path: Path
) -> None:
    arch = replace(
        PRESETS[preset], image_dim=IMAGE_DIM if PRESETS[preset].image_dim else 0, text_dim=32
    )
    if arch.animate:  # faces as high as the clips: see `images_of`
        arch = replace(arch, animate=replace(arch.animate, face_channels=(4, 4, 4, 4)))
        assert arch.animate.face_size == HEIGHT
    vae = narrow(tmp_path / "vae", **NARROW_2_2) if arch.token_times else checkpoint / "vae"
    found = conditioners(
        arch, ModelPaths(vae=str(vae), image_encoder=str(clip_folder)), CPU, VaeMode()
    )
    names = [
        "clip",
        *(column.name for column in columns(arch) if column.kind in ("image", "video")),
    ]
    keyframes = {"wantodance_keyframes_mask": str([1] + [0] * (FRAMES - 1))} if arch.music else {}
    size = {"height": 64, "width": 96} if arch.token_times else {"height": HEIGHT, "width": WIDTH}
    stored = images_of(tmp_path / "stored", names, size, is_mirrored=False)
    flipped = images_of(tmp_path / "flipped", names, size, is_mirrored=True)
    seen = []
    for conditioner in found:
        if conditioner.kind in ("music", "camera"):
            continue

        def made(files: dict[str, str], *, is_mirrored: bool) -> dict[str, torch.Tensor]:
            others = {name: path for name, path in files.items() if name != "clip"} | keyframes
            given = controls(files["clip"], others, is_mirrored=is_mirrored, **size)
            return encoded(conditioner, given)  # noqa: B023

        ours, theirs, plain = (
            made(stored, is_mirrored=True),
            made(flipped, is_mirrored=False),
            made(stored, is_mirrored=False),
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name
            assert not torch.equal(tensor, plain[name]), name
            seen.append(name)
    assert [name for name in seen if name not in IN_FRONT] == VISUAL[preset]
