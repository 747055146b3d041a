"""Which way up the frames of a video are shown: turned and mirrored as its display matrix says.

Phones store what the sensor reads and ask players to turn it; front cameras, and editors that flip a clip without encoding it again, ask them to
mirror it. Source: the matrix of ISO 14496-12, 6.2.2, which libav hands on with every frame, whatever the container stored.
"""

import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ditkit_core.errors import UserError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.sidedata.sidedata import SideData

_ONE_DEGREE = 0.0175
"""Sine of the angle by which a quarter turn may be off, as in ffmpeg."""


class Orientation(NamedTuple):
    """One of the eight ways to turn and mirror an image."""

    quarter_turns: int = 0
    """Anticlockwise, 0 to 3."""
    is_mirrored: bool = False
    """Whether left and right are exchanged after the turns."""

    def applied(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The image as a player shows it, height × width × channels."""
        turned = np.rot90(image, self.quarter_turns)
        return turned[:, ::-1] if self.is_mirrored else turned


def orientation_of(frame: "VideoFrame", path: Path) -> Orientation:
    """How a player shows a frame."""
    matrix = _matrix(frame)
    if matrix is None:
        return Orientation()
    a, b, _, c, d, *_ = matrix
    # A point (x, y) is shown at (a x + c y, b x + d y). Sizes do not matter: libav makes the aspect ratio of pixels of them.
    across, down = np.hypot(a, c), np.hypot(b, d)
    if not across and not down:  # some programs leave the matrix empty, and players show such a file as it is stored
        return Orientation()
    if across and down:
        if max(abs(c) / across, abs(b) / down) < _ONE_DEGREE:
            return Orientation(quarter_turns=2 * (d < 0), is_mirrored=(a < 0) != (d < 0))
        if max(abs(a) / across, abs(d) / down) < _ONE_DEGREE:
            return Orientation(quarter_turns=1 if b < 0 else 3, is_mirrored=(b < 0) == (c < 0))
    raise UserError(
        f"{path} asks players to show its frames at an angle that is no quarter turn, or sheared; re-encode it (ffmpeg -i IN OUT.mp4) and look "
        "at the result, or remove it"
    )


def was_read_otherwise(frame: "VideoFrame", orientation: Orientation) -> bool:
    """Whether versions that knew the angle of the matrix alone turned this frame in another way."""
    return orientation != Orientation(round(frame.rotation / 90) % 4)


def _matrix(frame: "VideoFrame") -> tuple[int, ...] | None:
    """The display matrix, row by row, in 1/65536; None if the frame has none."""
    data = cast("SideData | None", frame.side_data.get("DISPLAYMATRIX"))
    return None if data is None else struct.unpack("=9i", bytes(data))
