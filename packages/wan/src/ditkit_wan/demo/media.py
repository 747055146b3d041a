"""The demo's clips: short encoded videos of simple moving shapes, each described exactly by its caption."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ditkit_core.data.media.synthetic import paint
from ditkit_core.io.files import write_text

DIRECTIONS = {"right": (0, 1), "left": (0, -1), "down": (1, 0), "up": (-1, 0)}


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Content and encoding of one video."""

    colour: str
    shape: str
    direction: str
    background: str
    height: int
    width: int
    fps: int
    frames: int

    @property
    def caption(self) -> str:
        """The sentence that describes the clip."""
        return f"a {self.colour} {self.shape} moves {self.direction} on a {self.background} background"


def _clip(look: str, height: int, width: int, fps: int, frames: int) -> Clip:
    colour, shape, direction, background = look.split()
    return Clip(
        colour=colour,
        shape=shape,
        direction=direction,
        background=background,
        height=height,
        width=width,
        fps=fps,
        frames=frames,
    )


CLIPS = (
    _clip("red circle right dark", 96, 96, 16, 18),
    _clip("blue square left dark", 64, 96, 24, 24),
    _clip("green triangle up bright", 96, 64, 16, 12),
    _clip("yellow circle down dark", 80, 112, 30, 36),
    _clip("red square up bright", 112, 112, 25, 40),
    _clip("blue circle right bright", 64, 64, 12, 20),
    _clip("green square left dark", 72, 128, 30, 60),
    _clip("yellow triangle right dark", 128, 96, 24, 36),
    _clip("red triangle down bright", 96, 96, 15, 15),
    _clip("blue triangle up dark", 64, 112, 20, 24),
    _clip("green circle down bright", 120, 96, 16, 32),
    _clip("yellow square left dark", 96, 128, 24, 20),
)
"""Sizes from 64 to 128 pixels, 12 to 30 frames per second, 0.7 to 2 seconds."""


def render(clip: Clip) -> np.ndarray:
    """The frames of a clip, uint8 [frames, height, width, 3]: the shape crosses the image once."""
    step_down, step_right = DIRECTIONS[clip.direction]
    frames = np.empty((clip.frames, clip.height, clip.width, 3), dtype=np.uint8)
    for index, progress in enumerate(np.linspace(-0.6, 0.6, clip.frames)):
        centre_row = clip.height / 2 + step_down * progress * (clip.height / 2)
        centre_column = clip.width / 2 + step_right * progress * (clip.width / 2)
        frames[index] = paint(
            clip.height,
            clip.width,
            shape=clip.shape,
            colour=clip.colour,
            background=clip.background,
            centre=(centre_row, centre_column),
            radius=0.2 * min(clip.height, clip.width),
        )
    return frames


def write_clip(path: Path, clip: Clip) -> None:
    """Encode a clip as H.264 in mp4, with its caption in a .txt file of the same name."""
    import av

    # The same bytes every time: with several threads or macroblock trees, libx264 wrote different ones.
    options = {"crf": "16", "threads": "1", "x264-params": "mbtree=0"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=clip.fps, options=options)
        stream.height, stream.width, stream.pix_fmt = clip.height, clip.width, "yuv420p"
        for frame in render(clip):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    write_text(path.with_suffix(".txt"), clip.caption + "\n")
