"""Conditions of WanToDance besides text: music, an image of the dancer, and keyframes.

Source: diffsynth/pipelines/wan_video.py of modelscope/DiffSynth-Studio.
"""

import json
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.encoding.cache import key
from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import VaeConditioner, column_or_own, image_or_own
from ditkit_core.models.conditions import ClipConditioner, ClipInputs
from ditkit_wan.conditioning import music_features
from ditkit_wan.conditioning.images import ClipVision, known_frames_mask
from ditkit_wan.conditioning.media import missing_condition, video

_ROUNDING = 2e-3  # in rows per frame: 29.97 frames per second are taken as 30
MUSIC, DANCER = "wantodance_music_path", "wantodance_reference_image"
KEYFRAMES, KEYFRAMES_MASK = "wantodance_keyframes", "wantodance_keyframes_mask"


class Music(ClipConditioner):
    """`music` [rows, 35]: features of the music during the clip."""

    kind = "music"

    def __init__(self, fps: float = music_features.RATE):
        """Set the length of a single frame.

        Args:
            fps: The model's frames per second; a still image lasts one frame.
        """
        self.fps = fps

    @cached_property
    def identity(self) -> str:
        """There are no weights."""
        rows = f"{music_features.FEATURES} features, {music_features.RATE} rows a second, of sound up to a clip's end"
        return key(self.kind, rows, f"{self.fps:g}")

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The music.

        Raises:
            MissingDependency: If it is sound, and librosa is not installed.
            UserError: If there is none, or a frame does not last an integer number of rows, which
                encodes the frame rate.
        """
        if MUSIC not in controls.files:
            raise missing_condition(controls, [MUSIC], "which this model dances to")
        fps = controls.fps or self.fps
        if abs(music_features.RATE / fps - _rows_to_frame(fps)) > _ROUNDING:
            raise UserError(
                f"data.fps = {fps:g}: WanToDance needs {music_features.RATE} frames per second "
                f"divided by an integer; set {music_features.RATE / _rows_to_frame(fps):g}"
            )
        music_features.check_library(Path(controls.files[MUSIC]))
        return (MUSIC,)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        return {
            "music": music_features.window(
                Path(controls.files[MUSIC]), **self._part_of_music(controls)
            )
        }

    def check(self, controls: ClipInputs) -> None:
        """Read the music and check its length; sound is decoded, but no features are computed."""
        self.uses(controls)
        music_features.check(Path(controls.files[MUSIC]), **self._part_of_music(controls))

    def _part_of_music(self, controls: ClipInputs) -> dict[str, float]:
        """The part of the music that belongs to a clip."""
        seconds = controls.frames / (controls.fps or self.fps)
        return {"start_seconds": controls.start_seconds, "seconds": seconds}


def _rows_to_frame(fps: float) -> int:
    """Rows of music per frame, rounded."""
    return max(1, round(music_features.RATE / fps))


class Keyframes(VaeConditioner):
    """`y`: a mask of the given frames, and latents of a video that is black between them.

    Without keyframes, the image of the dancer or the clip's first frame is the only given frame.
    """

    kind = "keyframes"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The video of keyframes and its mask, or the image of the first frame.

        Raises:
            UserError: If only one of video and mask is there, the mask is invalid or too short, or
                there is no image either.
        """
        columns = [column for column in (KEYFRAMES, KEYFRAMES_MASK) if column in controls.files]
        if len(columns) == 1:
            whose = controls.clip or "a sample"
            raise UserError(
                f"{whose} has {columns[0]} alone; give {KEYFRAMES} and {KEYFRAMES_MASK}, or neither"
            )
        if columns:
            _known(controls)
        return tuple(columns) or (column_or_own(controls, DANCER, why="a dance"),)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        if KEYFRAMES in controls.files:
            pixels, is_known = video(controls, KEYFRAMES), _known(controls)
        else:
            pixels = -torch.ones(3, controls.frames, controls.height, controls.width)  # black
            pixels[:, :1] = image_or_own(controls, DANCER)
            is_known = [True] + [False] * (controls.frames - 1)
        latents = self.latents(pixels)
        return {"y": torch.cat([known_frames_mask(is_known, *latents.shape[2:]), latents])}


class KeyframeVision(ClipVision):
    """`image`: CLIP tokens of the first frame of the video of keyframes, given or black; without a
    video, of the dancer."""

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The video of keyframes, or the image of the first frame."""
        return (KEYFRAMES,) if KEYFRAMES in controls.files else super().uses(controls)

    def images(self, controls: ClipInputs) -> list[Float[Tensor, "3 1 height width"]]:
        """The one image that is encoded."""
        if KEYFRAMES in controls.files:
            return [video(controls, KEYFRAMES, frames=1)]
        return super().images(controls)


def _known(controls: ClipInputs) -> list[bool]:
    """Which frames of the clip are keyframes, from a list of 0 and 1 for each frame of the
    video."""
    text = controls.files[KEYFRAMES_MASK]
    try:
        numbers = json.loads(text)
    except (ValueError, RecursionError):
        numbers = None
    if not isinstance(numbers, list) or not all(number in (0, 1) for number in numbers):
        raise UserError(
            f"{KEYFRAMES_MASK} = {text[:60]!r} is not a list of 0 and 1; write [1, 0, 0, …], one "
            f"for each frame"
        )
    first = round(controls.start_seconds * controls.fps)
    keyframes = [bool(number) for number in numbers[first : first + controls.frames]]
    if len(keyframes) < controls.frames:
        raise UserError(
            f"{KEYFRAMES_MASK} has {len(numbers)} numbers, and the clip takes frames {first} to "
            f"{first + controls.frames - 1}; give one for each frame"
        )
    return keyframes
