"""Clips whose contents the doctor is to judge: textures that move, cut, flash, fade and stand
still."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Frames = list[NDArray[Any]]


def texture(seed: int, height: int, width: int) -> NDArray[Any]:
    """Blotches of several sizes, in levels of 0…255."""
    random = np.random.default_rng(seed)
    layers = [
        np.kron(
            random.normal(size=(height // side + 1, width // side + 1, 3)) * side**0.7,
            np.ones((side, side, 1)),
        )
        for side in (4, 16, 64)
    ]
    mixed = np.sum([layer[:height, :width] for layer in layers], axis=0)
    return (mixed - mixed.min()) / np.ptp(mixed) * 255


def pan(seed: int, count: int, *, speed: int = 2, height: int = 96, width: int = 128) -> Frames:
    """A camera that moves sideways over a texture."""
    whole = texture(seed, height, width + speed * count)
    return [whole[:, i * speed : i * speed + width] for i in range(count)]


def smaller(frames: Frames, height: int, width: int) -> Frames:
    """The same at another size."""
    return [
        np.asarray(Image.fromarray(frame.astype(np.uint8)).resize((width, height)))
        for frame in frames
    ]


def written(
    path: Path, frames: Sequence[NDArray[Any]], *, fps: int = 24, crf: int = 20, hdr: bool = False
) -> Path:
    """Write frames as an mp4."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": str(crf)})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        if hdr:
            stream.codec_context.color_trc = 16
        for frame in frames:
            levels = np.clip(frame, 0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(levels, format="rgb24")))
        container.mux(stream.encode(None))
    return path
