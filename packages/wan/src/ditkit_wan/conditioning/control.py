"""What the Fun models are told beside text: a control video, the picture that a clip begins with, one that it looks like, and how a camera moves.

Source: aigc-apps/VideoX-Fun, scripts/wan2.1_fun/train_control.py and videox_fun/pipeline/pipeline_wan2_2_fun_control.py.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.clip import MediaInfo, available, probe
from ditkit_core.encoding.cache import key
from ditkit_core.errors import UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.models.conditions import ClipInputs
from ditkit_wan.conditioning import camera
from ditkit_wan.conditioning.images import FIRST, ClipVision, VaeConditioner
from ditkit_wan.conditioning.media import column_or_own, lacking, picture, picture_or_own, video

CONTROL, REFERENCE = "control_video", "reference_image"
_ROUNDING = 0.01  # of a frame: it is on screen from a moment that no fraction says exactly
DIRECTION, SPEED, PATH = "camera_control_direction", "camera_control_speed", "camera_file"


class Control(VaeConditioner):
    """`y`: latents of the control video, then those of the picture that the clip begins with.

    Only the first latent frame of the latter is there; the others, or all without a picture, are zeros as latents.
    """

    kind = "control"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The control video, and the picture if there is one.

        Raises:
            UserError: If there is no control video.
        """
        if CONTROL not in controls.files:
            raise lacking(controls, [CONTROL], "which this model is controlled by")
        return tuple(column for column in (CONTROL, FIRST) if column in controls.files)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        control = self.latents(video(controls, CONTROL))
        begin = torch.zeros_like(control)
        if FIRST in controls.files:
            begin[:, :1] = self.latents(picture(controls, FIRST))
        return {"y": torch.cat([control, begin])}


class FirstLatent(VaeConditioner):
    """`y`: latents of the picture that a clip begins with, and zeros as latents for the other frames."""

    kind = "first-latent"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The picture, or the clip itself."""
        return (column_or_own(controls, FIRST, why="a moving camera"),)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        begin = self.latents(picture_or_own(controls, FIRST))
        later = begin.new_zeros(len(begin), (controls.frames - 1) // self.vae.strides[0], *begin.shape[2:])
        return {"y": torch.cat([begin, later], dim=1)}


class Reference(VaeConditioner):
    """`reference`: latents of a picture of what the clip shows."""

    kind = "reference"
    optional = True

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The picture, if there is one."""
        return (REFERENCE,) if REFERENCE in controls.files else ()

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        return {"reference": self.latents(picture(controls, REFERENCE))}


class ControlVision(ClipVision):
    """`image`: CLIP's tokens of the reference, or else of the picture that a clip begins with; zeros where there is neither."""

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The one picture of the columns that is shown; "" for none, which is a condition too."""
        return (self._shown(controls) or "",)

    def encode(
        self, items: Sequence[Any], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        """Tokens of that picture [257, 1280]."""
        (controls,) = items
        shown = self.pictures(controls)
        if not shown:
            advance(1.0)
            return [{self.name: torch.zeros(self.encoder.tokens, self.encoder.dim)}]
        return [{self.name: self.encoder.encode(shown, advance)[0]["image"]}]

    def pictures(self, controls: ClipInputs) -> list[Float[Tensor, "3 1 height width"]]:
        """The one that is shown; none where there is none."""
        column = self._shown(controls)
        return [] if column is None else [picture(controls, column)]

    def _shown(self, controls: ClipInputs) -> str | None:
        return next((column for column in self.columns if column in controls.files), None)


class Camera:
    """`camera_path` [frames, 16]: lens and pose of the camera at each frame, which `camera.rays` makes rays of.

    The rays of a clip are hundreds of megabytes and made of 16 numbers for each frame: these are what the cache keeps.
    """

    kind = "camera"
    optional = False
    items_at_once = 1

    @cached_property
    def identity(self) -> str:
        """There are no weights."""
        return key(self.kind, "16 numbers, a file's first and last at the video's")

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The file of poses and the clip, which says how long it takes; or the direction and the speed.

        Raises:
            UserError: If there is neither, or what is there cannot be read: before any clip is encoded.
        """
        files = controls.files
        if PATH in files:
            camera.read_poses(Path(files[PATH]))
            return (PATH,) if controls.clip is None else (PATH, "")
        if DIRECTION in files:
            camera.moving(files[DIRECTION], files.get(SPEED, ""), 1)
            return tuple(column for column in (DIRECTION, SPEED) if column in files)
        raise lacking(controls, [DIRECTION, PATH], "which this model is controlled by")

    def load(self) -> None:
        """There are no weights."""

    def unload(self) -> None:
        """There are no weights."""

    def encode(
        self, items: Sequence[Any], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        """The path of one clip's camera."""
        (controls,) = items
        poses = self._poses(controls)
        advance(1.0)
        return [{"camera_path": camera.path_of(poses, height=controls.height, width=controls.width)}]

    def check(self, controls: ClipInputs) -> None:
        """Read the file of poses, or direction and speed."""
        self.uses(controls)
        self._poses(controls)

    def _poses(self, controls: ClipInputs) -> camera.Poses:
        files, frames = controls.files, controls.frames
        if PATH not in files:
            return camera.moving(files[DIRECTION], files.get(SPEED, ""), frames)
        if controls.clip is None or not controls.fps:
            poses = camera.read_poses(Path(files[PATH]))
            if len(poses) < frames:
                raise UserError(f"{files[PATH]} has {len(poses)} poses for {frames} frames; give one for each frame")
            return poses[:frames]
        info = _probed(controls.clip, controls.clip.stat().st_mtime_ns)
        rate = info.fps or controls.fps  # images of a folder that names no rate are frames of whatever clip is read
        there = round(info.seconds * info.fps) or available(controls.clip, controls.fps).frames
        times = controls.start_seconds + torch.arange(frames, dtype=torch.float64) / controls.fps
        shown = (times * rate + _ROUNDING).long()
        return camera.at(camera.read_poses(Path(files[PATH])), shown, of=there)


@lru_cache(maxsize=16)
def _probed(path: Path, modified: int) -> MediaInfo:
    """What a clip's file holds, read once for all of its windows: it takes all packets of the file.

    Args:
        path: The file.
        modified: When it was, so that another file under the name is read.
    """
    return probe(path)
