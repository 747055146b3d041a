"""Conditions of the Fun models besides text: a control video, a first image, a reference image, and
camera motion.

Source: aigc-apps/VideoX-Fun, scripts/wan2.1_fun/train_control.py and
videox_fun/pipeline/pipeline_wan2_2_fun_control.py.
"""

from functools import cached_property, lru_cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.data.media.clip import MediaInfo, available, probe
from ditkit_core.data.media.crop import CENTRE
from ditkit_core.encoding.cache import key
from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import (
    VaeConditioner,
    column_image,
    column_or_own,
    image_or_own,
)
from ditkit_core.models.conditions import ClipConditioner, ClipInputs
from ditkit_wan.conditioning import camera
from ditkit_wan.conditioning.images import FIRST, LAST, ClipVision, EndsConditioner
from ditkit_wan.conditioning.media import missing_condition, video

CONTROL, REFERENCE = "control_video", "reference_image"
# of a frame: its start time is rounded, so a time just below it is meant as this frame
_ROUNDING = 0.01
DIRECTION, SPEED, PATH = "camera_control_direction", "camera_control_speed", "camera_file"


def _with_control(controls: ClipInputs, *others: str) -> tuple[str, ...]:
    """The control video, and the other columns that the clip has."""
    if CONTROL not in controls.files:
        raise missing_condition(controls, [CONTROL], "which this model is controlled by")
    return tuple(column for column in (CONTROL, *others) if column in controls.files)


class Control(VaeConditioner):
    """`y`: latents of the control video, then latents of the first image.

    The latter have one latent frame; the others are zeros as latents, and so are all of them
    without an image.
    """

    kind = "control"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The control video, and the first image if there is one.

        Raises:
            UserError: If there is no control video.
        """
        return _with_control(controls, FIRST)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        control = self.latents(video(controls, CONTROL))
        begin = torch.zeros_like(control)
        if FIRST in controls.files:
            begin[:, :1] = self.latents(column_image(controls, FIRST))
        return {"y": torch.cat([control, begin])}


class MaskedControl(EndsConditioner):
    """`y` of the Fun models of Wan 2.2: latents of the control video, a mask of the given frames,
    and latents of a clip that has these alone.

    Mask and latents are zeros without a first or last image.
    """

    kind = "masked-control"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The control video, and the first and the last image if there are any.

        Raises:
            UserError: If there is no control video.
        """
        return _with_control(controls, FIRST, LAST)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        control = self.latents(video(controls, CONTROL))
        first, last = (
            column_image(controls, column) if column in controls.files else None
            for column in (FIRST, LAST)
        )
        if first is None and last is None:
            return {
                "y": torch.cat(
                    [control, control.new_zeros(4, *control.shape[1:]), torch.zeros_like(control)]
                )
            }
        ends = self.given_frames(controls, first, last)
        return ends | {"y": torch.cat([control, ends["y"]])}


class FirstLatent(VaeConditioner):
    """`y`: latents of the first image, and zeros as latents for the other frames."""

    kind = "first-latent"

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The image, or the clip itself."""
        return (column_or_own(controls, FIRST, why="a moving camera"),)

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        begin = self.latents(image_or_own(controls, FIRST))
        later = begin.new_zeros(
            len(begin), (controls.frames - 1) // self.vae.strides[0], *begin.shape[2:]
        )
        return {"y": torch.cat([begin, later], dim=1)}


class Reference(VaeConditioner):
    """`reference`: latents of an image of the clip's subject."""

    kind = "reference"
    optional = True

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The image, if there is one."""
        return (REFERENCE,) if REFERENCE in controls.files else ()

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        return {"reference": self.latents(column_image(controls, REFERENCE))}


class ControlVision(ClipVision):
    """`image`: CLIP tokens of the reference image, or else of the first image; zeros without
    either."""

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The column of the image that is encoded; "" for none, which is a condition too."""
        return (self._column(controls) or "",)

    def images(self, controls: ClipInputs) -> list[Float[Tensor, "3 1 height width"]]:
        """The image that is encoded; empty if there is none."""
        column = self._column(controls)
        return [] if column is None else [column_image(controls, column)]

    def _column(self, controls: ClipInputs) -> str | None:
        return next((column for column in self.columns if column in controls.files), None)


class Camera(ClipConditioner):
    """`camera_path` [frames, 16]: lens and pose of the camera at each frame, from which
    `camera.rays` computes rays.

    The cache stores these 16 numbers per frame, because the rays of a clip take hundreds of
    megabytes.
    """

    kind = "camera"

    @cached_property
    def identity(self) -> str:
        """There are no weights."""
        return key(self.kind, "16 numbers, a file's first and last at the video's")

    def uses(self, controls: ClipInputs) -> tuple[str, ...]:
        """The file of poses and the clip, which gives its length; or the direction and the speed.

        Raises:
            UserError: If there is neither, or one cannot be read. This is raised before any clip is
                encoded.
        """
        files = controls.files
        if PATH in files and controls.crop != CENTRE:
            raise UserError(
                f"{controls.clip} is in data.crops, and its {PATH} describes a lens that looks at "
                f"the middle of the picture; take it out of data.crops, or give {DIRECTION}"
            )
        if PATH in files:
            camera.read_poses(Path(files[PATH]))
            return (PATH,) if controls.clip is None else (PATH, "")
        if DIRECTION in files:
            camera.moving(files[DIRECTION], files.get(SPEED, ""), 1)
            return tuple(column for column in (DIRECTION, SPEED) if column in files)
        raise missing_condition(controls, [DIRECTION, PATH], "which this model is controlled by")

    def condition(self, controls: ClipInputs) -> dict[str, Tensor]:
        poses = self._poses(controls)
        return {"camera_path": camera.path_of(poses, height=controls.height, width=controls.width)}

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
                raise UserError(
                    f"{files[PATH]} has {len(poses)} poses for {frames} frames; give one for each "
                    f"frame"
                )
            return poses[:frames]
        info = _probed(controls.clip, controls.clip.stat().st_mtime_ns)
        rate = info.fps or controls.fps  # a folder of images without a rate has the clip's rate
        num_frames = round(info.seconds * info.fps) or available(controls.clip, controls.fps).frames
        times = controls.start_seconds + torch.arange(frames, dtype=torch.float64) / controls.fps
        frame_numbers = (times * rate + _ROUNDING).long()
        return camera.at(camera.read_poses(Path(files[PATH])), frame_numbers, of=num_frames)


@lru_cache(maxsize=16)
def _probed(path: Path, modified: int) -> MediaInfo:
    """The length and rate of a clip's file, probed once for all of its windows, because probing
    reads every packet.

    Args:
        path: The file.
        modified: Its time of modification, so that a new file of the same name is read.
    """
    return probe(path)
