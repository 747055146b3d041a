"""Clips of a demo that teaches a motion: short encoded videos of one moving shape, each described
exactly by its caption.

A base was trained on such clips (tools/demo/train_demo_base_wan.py, train_demo_base_ltx.py), with
motions other than the `NEW` one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from ditkit_core.data.media.synthetic import BACKGROUNDS, COLOURS, SHAPES, write_frames
from ditkit_core.io.files import write_text

SIDE, FRAMES, FPS = 64, 9, 16
"""Pixels, frames and frames per second that the base was trained at, and that the demo trains
at."""
RADIUS = 13.0
"""Of every shape, in pixels of an image of `SIDE` pixels, as all lengths of a `Scene`."""
_EDGE = 5.0
"""Width of the soft edge: an edge of one pixel needs a larger VAE for the same error."""
TRAVEL = 24.0
"""How far a shape moves in `FRAMES` frames."""
NEW = "diagonally"
DIRECTIONS = {
    "right": (0.0, 1.0),
    "left": (0.0, -1.0),
    "down": (1.0, 0.0),
    "up": (-1.0, 0.0),
    NEW: (1.0, 1.0),
}
"""Rows and columns; `NEW` is unknown to the base."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A moving shape, in pixels of an image of `SIDE` pixels."""

    colour: str
    shape: str
    start: tuple[float, float]
    """Row and column of the centre in the first frame."""
    velocity: tuple[float, float]
    """Rows and columns per frame of `FPS`."""

    def paint(
        self, height: int, width: int, times: Sequence[float] | range
    ) -> Float[np.ndarray, "frames {height} {width} 3"]:
        """Frames from 0 to 255, unrounded; the shorter side shows `SIDE` pixels, centred.

        Args:
            times: Of the frames, in frames of `FPS`.
        """
        cover = self.cover(height, width, times)[..., None]
        return cover * np.array(COLOURS[self.colour]) + (1 - cover) * np.array(BACKGROUNDS["dark"])

    def cover(
        self, height: int, width: int, times: Sequence[float] | range
    ) -> Float[np.ndarray, "frames {height} {width}"]:
        """How much of each pixel the shape covers, 0 to 1; arguments as of `paint`."""
        unit = SIDE / min(height, width)
        frames = np.asarray(times, dtype=np.float64)[:, None, None]
        down = (np.arange(height)[:, None] - (height - 1) / 2) * unit + (SIDE - 1) / 2
        right = (np.arange(width)[None, :] - (width - 1) / 2) * unit + (SIDE - 1) / 2
        inside = _inside(
            self.shape,
            down - self.start[0] - frames * self.velocity[0],
            right - self.start[1] - frames * self.velocity[1],
        )
        cover = np.clip(inside / _EDGE + 0.5, 0, 1)
        return np.asarray(cover * cover * (3 - 2 * cover))


def _inside(shape: str, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Pixels from the shape's outline, positive inside."""
    if shape == "circle":
        return RADIUS - np.hypot(down, right)
    if shape == "square":
        return 0.9 * RADIUS - np.maximum(np.abs(down), np.abs(right))
    assert shape == "triangle", shape
    # equilateral, point up
    return 0.62 * RADIUS - np.maximum(down, np.abs(right) * 0.75**0.5 - down / 2)


def moving(colour: str, shape: str, direction: str, offset: float = 0.0) -> Scene:
    """A shape that crosses the image once in `FRAMES` frames.

    Args:
        direction: One of `DIRECTIONS`.
        offset: How far its path passes from the image's centre, in pixels.
    """
    down, right = DIRECTIONS[direction]
    centre = (SIDE - 1) / 2
    start = (
        centre - down * TRAVEL / 2 + right * offset,
        centre - right * TRAVEL / 2 - down * offset,
    )
    step = TRAVEL / (FRAMES - 1)
    return Scene(colour=colour, shape=shape, start=start, velocity=(down * step, right * step))


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Content and encoding of one video."""

    scene: Scene
    direction: str
    height: int
    width: int
    fps: int
    frames: int

    @property
    def caption(self) -> str:
        """The sentence that describes the clip."""
        return motion_caption(self.scene.colour, self.scene.shape, self.direction)


def motion_caption(colour: str, shape: str, direction: str) -> str:
    """The sentence that describes a clip."""
    return f"a {colour} {shape} moves {direction} on a dark background"


CAPTIONS = [
    motion_caption(colour, shape, way)
    for way in DIRECTIONS
    for colour in COLOURS
    for shape in SHAPES
]
"""Every caption of the demo, the new motion's included: they give the tokenizer its words, in the
order that the text encoders were made for."""


def _clip(look: str, offset: float, height: int, width: int, fps: int) -> Clip:
    colour, shape, direction = look.split()
    scene = moving(colour, shape, direction, offset)
    return Clip(
        scene=scene, direction=direction, height=height, width=width, fps=fps, frames=fps * 3 // 4
    )


CLIPS = (
    _clip("red circle diagonally", 0.0, 64, 64, 16),
    _clip("red triangle diagonally", 4.0, 96, 96, 32),
    _clip("green circle diagonally", -4.0, 72, 88, 16),
    _clip("green square diagonally", 0.0, 128, 96, 48),
    _clip("blue square diagonally", 4.0, 88, 72, 16),
    _clip("blue triangle diagonally", -4.0, 88, 112, 32),
    _clip("red square right", 6.0, 64, 64, 32),
    _clip("blue circle right", -6.0, 96, 96, 16),
    _clip("yellow triangle right", 0.0, 80, 104, 48),
    _clip("green circle left", 6.0, 96, 80, 16),
    _clip("red triangle left", -6.0, 128, 96, 32),
    _clip("yellow square left", 0.0, 80, 80, 48),
    _clip("blue square down", 6.0, 112, 112, 16),
    _clip("green triangle down", -6.0, 104, 128, 32),
    _clip("yellow circle down", 0.0, 96, 72, 48),
    _clip("red circle up", 6.0, 120, 96, 16),
    _clip("yellow circle diagonally", 0.0, 112, 88, 16),
    _clip("yellow triangle diagonally", 4.0, 96, 120, 32),
    _clip("red circle diagonally", -4.0, 96, 128, 48),
    _clip("green square diagonally", 4.0, 64, 80, 16),
    _clip("blue triangle diagonally", 0.0, 128, 128, 32),
    _clip("yellow circle diagonally", -4.0, 80, 64, 48),
    _clip("red triangle diagonally", -7.0, 64, 72, 16),
    _clip("green circle diagonally", 4.0, 80, 80, 32),
    _clip("blue square diagonally", 0.0, 72, 96, 48),
    _clip("yellow triangle diagonally", -4.0, 96, 72, 16),
    _clip("green square up", -6.0, 64, 72, 32),
    _clip("blue triangle up", 0.0, 80, 96, 48),
)
"""Sixteen of the motion that is `NEW`, and twelve that the base knows already, so that it stays
able to do those; sizes from 64 to 128 pixels, at most a quarter of them outside the square that is
trained, multiples of `FPS` (other rates would make a motion jerk), 0.75 seconds. Held-out clips are
chosen by file name, and so by the order here: it makes them clips of the new motion, whose loss is
what a reader of the demo's report wants to see."""
UNSEEN = ("red square", "green triangle", "blue circle", "yellow square")
"""Colours and shapes that no clip shows in the new motion."""


def render_clip(clip: Clip) -> UInt8[np.ndarray, "{clip.frames} {clip.height} {clip.width} 3"]:
    """The frames of a clip."""
    times = [index * FPS / clip.fps for index in range(clip.frames)]
    return np.round(clip.scene.paint(clip.height, clip.width, times)).astype(np.uint8)


def write_clips(folder: Path) -> None:
    """Write the clips of the demo, each with its caption."""
    for index, clip in enumerate(CLIPS):
        write_clip(folder / f"clip{index:02d}.mp4", clip)


def write_clip(path: Path, clip: Clip) -> None:
    """Encode a clip as H.264 in mp4, with its caption in a .txt file of the same name."""
    write_frames(path, list(render_clip(clip)), clip.fps)
    write_text(path.with_suffix(".txt"), clip.caption + "\n")
