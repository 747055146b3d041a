"""Camera motion: paths by direction or from a file of poses, and the rays through each pixel, which
the Fun camera models take.

A pose is a line of 19 numbers, as in files of RealEstate10K and CameraCtrl: a time, focal lengths
and centre as fractions of the image's size (fx, fy, cx, cy), two unused numbers, and the 3 × 4
matrix from world to camera, row by row. Sources: videox_fun/data/utils.py of aigc-apps/VideoX-Fun;
diffsynth/models/wan_video_camera_controller.py of modelscope/DiffSynth-Studio.
"""

import math
import re
from pathlib import Path

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ditkit_core.errors import UserError

DIRECTIONS = ("Left", "Right", "Up", "Down", "In", "Out")
DEFAULT_SPEED = 1 / 54
"""Per frame."""
_FILMED = 1280 / 720
"""Aspect ratio of the images that focal lengths are fractions of."""
_START = (0, 0.532139961, 0.946026558, 0.5, 0.5, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0)
# The entry of a pose that the speed is added to, and the sign. Left, Right, Up and Down are entries
# of the rotation, because the models were trained so.
_STEPS = {
    "Left": (9, 1),
    "Right": (9, -1),
    "Up": (13, 1),
    "Down": (13, -1),
    "In": (18, -1),
    "Out": (18, 1),
}
_NUMBERS = 19
_MOST_BYTES = 2**24

Poses = Float[Tensor, "frames 19"]


def moving(direction: str, speed: str, frames: int) -> Poses:
    """Poses of a camera that moves steadily from the start of a clip.

    Args:
        direction: One of `DIRECTIONS`, or two in one word: `LeftUp`.
        speed: A number, per frame; empty means `DEFAULT_SPEED`.
        frames: Number of poses.

    Raises:
        UserError: If a direction is unknown or the speed is not a number.
    """
    named = re.findall("|".join(DIRECTIONS), direction.strip())
    if not named or "".join(named) != direction.strip():
        raise UserError(
            f"camera_control_direction = {direction!r}: use {', '.join(DIRECTIONS)}, or two as in "
            f"LeftUp"
        )
    try:
        step = float(speed) if speed.strip() else DEFAULT_SPEED
    except ValueError:
        step = math.nan
    if not math.isfinite(step):
        raise UserError(
            f"camera_control_speed = {speed!r} is not a number; 1/54 = {DEFAULT_SPEED:.6f} is usual"
        )
    poses = torch.tensor(_START, dtype=torch.float64).repeat(frames, 1)
    for name in dict.fromkeys(named):
        entry, sign = _STEPS[name]
        poses[:, entry] += sign * step * torch.arange(frames)
    return poses


def read_poses(path: Path) -> Poses:
    """The poses of a text file: a first line that is ignored, then one pose per line.

    Raises:
        UserError: If it cannot be read, has no pose, or a line is not a pose.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path} is too large for a file of camera poses; give the right file")
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as a file of camera poses; correct the path, or write it as "
            f"text"
        ) from error
    poses = []
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        try:
            pose = [float(part) for part in line.split()]
        except ValueError:
            pose = []
        if len(pose) != _NUMBERS or not all(map(math.isfinite, pose)) or min(pose[1:3]) <= 0:
            raise UserError(
                f"{path}, line {number} is not a camera pose; a pose is {_NUMBERS} numbers: time, "
                f"fx fy cx cy, 0 0, and 3 × 4 of the matrix"
            )
        poses.append(pose)
    if not poses:
        raise UserError(
            f"{path} has no camera pose; the first line is ignored, then each has {_NUMBERS} "
            f"numbers"
        )
    table = torch.tensor(poses, dtype=torch.float64)
    if (torch.linalg.det(_matrices(table)).abs() < 1e-6).any():
        raise UserError(
            f"{path} has a singular matrix; the last 12 numbers are rotation and translation, row "
            f"by row"
        )
    return table


def at(poses: Float[Tensor, "rows 19"], frames: Int[Tensor, " frames"], *, of: int) -> Poses:
    """Poses of some frames of the video that a file was made for, linearly interpolated between the
    file's poses.

    Args:
        poses: From the video's first frame to its last.
        frames: Numbers of the frames, from 0.
        of: Number of frames of the video.
    """
    position = frames.double().clamp(0, of - 1) * (len(poses) - 1) / max(of - 1, 1)
    below = position.floor().long()
    above = (below + 1).clamp(max=len(poses) - 1)
    return torch.lerp(poses[below], poses[above], (position - below)[:, None])


def path_of(poses: Poses, *, height: int, width: int) -> Float[Tensor, "frames 16"]:
    """Focal lengths and centre in pixels, and the camera-to-world matrix relative to the first
    frame's camera, in fp32.

    Args:
        poses: One for each frame.
        height: Height of the clip in pixels.
        width: Width of the clip in pixels.
    """
    focal = poses[:, 1:5].clone()
    if width / height < _FILMED:
        focal[:, 0] *= height * _FILMED / width
    else:
        focal[:, 1] *= width / _FILMED / height
    lens = focal * torch.tensor([width, height, width, height], dtype=torch.float64)
    to_camera = _matrices(poses)
    relative = to_camera[:1] @ torch.linalg.inv(to_camera)
    # Exactly, where the product with the inverse only comes close.
    relative[0] = torch.eye(4, dtype=torch.float64)
    return torch.cat([lens, relative[:, :3].flatten(1)], dim=1).float()


def rays(
    path: Float[Tensor, "frames 16"], *, height: int, width: int
) -> Float[Tensor, "24 f height width"]:
    """Plücker coordinates of the ray through each pixel: moment and direction, with a channel for
    each of the four frames of a latent frame.

    The first frame is repeated four times, because the VAE's first latent frame is one frame.

    Args:
        path: The result of `path_of` for 4k + 1 frames.
        height: Height in pixels.
        width: Width in pixels.
    """
    lens, relative = path[:, :4, None, None], path[:, 4:].unflatten(1, (3, 4))
    across = torch.arange(width, device=path.device, dtype=path.dtype) + 0.5
    down = torch.arange(height, device=path.device, dtype=path.dtype)[:, None] + 0.5
    x = ((across - lens[:, 2]) / lens[:, 0]).expand(-1, height, -1)
    y = ((down - lens[:, 3]) / lens[:, 1]).expand(-1, -1, width)
    directions = torch.stack([x, y, torch.ones_like(x)], dim=-1)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    # No matmul: inputs are made outside of the engine, where an autocast may be active and would
    # round it.
    rotated = [relative[:, None, None, :, axis] * directions[..., axis, None] for axis in range(3)]
    direction = rotated[0] + rotated[1] + rotated[2]
    origin = relative[:, None, None, :, 3].expand_as(direction)
    plucker = torch.cat([torch.linalg.cross(origin, direction), direction], dim=-1)
    grouped = torch.cat([plucker[:1].expand(3, -1, -1, -1), plucker])
    return rearrange(grouped, "(f t) h w c -> (c t) f h w", t=4)


def _matrices(poses: Poses) -> Float[Tensor, "frames 4 4"]:
    matrices = torch.eye(4, dtype=poses.dtype).repeat(len(poses), 1, 1)
    matrices[:, :3] = poses[:, 7:].unflatten(1, (3, 4))
    return matrices
