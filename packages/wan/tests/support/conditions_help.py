"""What tests of conditions share: images and videos whose frames can be told apart, sounds, and the
VAE of the tiny checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ditkit_core.data.media.clip import write_image, write_video
from ditkit_core.models.conditions import ClipInputs
from ditkit_core.models.paths import ModelPaths
from ditkit_wan.encoders.vae import VaeEncoder

CPU = torch.device("cpu")
FRAMES, HEIGHT, WIDTH = 9, 32, 48


def noise(name: int, frames: int = 1, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """Smooth colours in [0, 1] of [3, frames, height, width]."""
    small = torch.rand(3, frames, 2, 3, generator=torch.Generator().manual_seed(name))
    return torch.nn.functional.interpolate(
        small.transpose(0, 1), size=(height, width), mode="bilinear"
    ).transpose(0, 1)


def image_file(path: Path, name: int, height: int = HEIGHT, width: int = WIDTH) -> str:
    write_image(path, noise(name, 1, height, width)[:, 0])
    return str(path)


def video_file(path: Path, name: int, frames: int = FRAMES, fps: float = 16.0) -> str:
    key = path.suffix, name, frames, fps
    if key in _VIDEOS:
        path.write_bytes(_VIDEOS[key])
    else:
        write_video(path, noise(name, frames), fps)
        _VIDEOS[key] = path.read_bytes()
    return str(path)


_VIDEOS: dict[tuple[str, int, int, float], bytes] = {}
"""Videos that were encoded before."""


def sound_file(path: Path, samples: np.ndarray, rate: int = 8000) -> str:
    """A wav of 32-bit floats, two channels."""
    data = np.stack([samples, samples], axis=1).astype("<f4").tobytes()
    head = b"WAVEfmt " + np.array([16], "<u4").tobytes() + np.array([3, 2], "<u2").tobytes()
    head += np.array([rate, rate * 8], "<u4").tobytes() + np.array([8, 32], "<u2").tobytes()
    body = head + b"data" + np.array([len(data)], "<u4").tobytes() + data
    path.write_bytes(b"RIFF" + np.array([len(body)], "<u4").tobytes() + body)
    return str(path)


def controls(
    clip: str | Path | None, files: dict[str, str] | None = None, **changes: Any
) -> ClipInputs:
    given = {
        "frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "fps": 16.0,
        "start_seconds": 0.0,
    } | changes
    return ClipInputs(clip=None if clip is None else Path(clip), files=files or {}, **given)


def tiny_vae(checkpoint: Path) -> VaeEncoder:
    return VaeEncoder(ModelPaths(base=str(checkpoint)), CPU)


def encoded(conditioner: Any, given: ClipInputs) -> dict[str, Tensor]:
    """What a conditioner makes of one clip."""
    (tensors,) = encoded_by_one(conditioner, given)
    return tensors


def encoded_by_one(conditioner: Any, *given: ClipInputs) -> list[dict[str, Tensor]]:
    """What a conditioner makes of clips, one by one; it is loaded once."""
    conditioner.load()
    try:
        return [dict(tensors) for clip in given for tensors in conditioner.encode([clip])]
    finally:
        conditioner.unload()
