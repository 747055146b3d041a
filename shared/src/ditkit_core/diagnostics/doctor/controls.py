"""Whether what goes with a clip looks like going with it: pictures of its ends, and videos that it follows frame by frame.

All of it can be trained on; what is told here is that a model would learn from pairs that do not belong together.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import MediaInfo, kind_of, probe, read_clip
from ditkit_core.diagnostics.doctor.findings import Finding
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column

UNLIKE_LEVELS = 16.0
"""Mean difference, in levels of 0…255, from which a picture is not the frame that it stands for; other sizes and codecs make 5 at most."""
SAME_SECONDS = 0.05
"""Share of a clip's length, and in seconds four times that, by which what goes with it may be longer."""
SAME_SHAPE = 0.03
"""Share by which ratios of width to height may differ."""

_SIDE = 48  # pixels of the longer side at which pictures are compared


def of_pictures(sample: Sample, columns: Sequence[Column], fps: float) -> Iterator[Finding]:
    """Pictures of the clip's beginning or end that show something else.

    Args:
        sample: The clip; what goes with it has been read without an error.
        columns: Of the model.
        fps: Frames per second of the clip; 0 for a still image.

    Raises:
        UserError: If one cannot be read.
    """
    scale = _SIDE / max(sample.height, sample.width)
    height, width = max(1, round(sample.height * scale)), max(1, round(sample.width * scale))
    for column in columns:
        is_used = column.moment == "begin" or (column.moment == "end" and sample.frames > 1)
        if not is_used or column.name not in sample.controls:
            continue
        after = (sample.frames - 1) / fps if column.moment == "end" and fps else 0.0
        own = read_clip(
            sample.media, frames=1, fps=fps or 1.0, height=height, width=width,
            start_seconds=sample.start_seconds + after,
        )  # fmt: skip
        given = read_clip(Path(sample.controls[column.name]), frames=1, fps=1.0, height=height, width=width)
        levels = 127.5 * float((own - given).abs().mean())
        if levels >= UNLIKE_LEVELS:
            frame = f"the last of its {sample.frames} frames" if column.moment == "end" else "its first frame"
            yield Finding(
                code="D18", severity="warning", where=sample.id,
                what=f"{column.name} {sample.controls[column.name]} does not look like {frame} ({levels:.0f} levels apart)",
                remedy="name the right picture, cut the file so that it fits, or leave the column empty",
            )  # fmt: skip


def of_followed(sample: Sample, columns: Sequence[Column]) -> Iterator[Finding]:
    """Videos that a clip follows, and masks, which do not lie over it in time or in space.

    Args:
        sample: The clip.
        columns: Of the model.
    """
    for column in columns:
        path = Path(sample.controls[column.name]) if column.name in sample.controls else None
        if path is None or column.kind != "video":
            continue
        try:
            own, given = probe(sample.media), probe(path)
        except (
            UserError
        ):  # damaged behind what is used of it, which is told of the clip and no matter of what goes with it
            continue
        if kind_of(path) == "video" and (late := _out_of_step(own, given)):
            yield Finding(
                code="D19", severity="warning", where=sample.media.name, what=f"{column.name} {path} {late}",
                remedy="give it the frame rate of the clip (ffmpeg -r RATE -i IN -r RATE OUT.mp4), or cut it as the clip",
            )  # fmt: skip
        ratio = (given.width * own.height) / (given.height * own.width)
        if abs(ratio - 1) > SAME_SHAPE:
            yield Finding(
                code="D19", severity="warning", where=sample.media.name,
                what=f"{column.name} {path} is {given.width} x {given.height} and its clip {own.width} x {own.height}: "
                "each is cut to the centre by itself, and they do not lie over each other",
                remedy="give both the same shape",
            )  # fmt: skip


def _out_of_step(own: MediaInfo, given: MediaInfo) -> str:
    """How a video runs otherwise than its clip; empty if it does not, or is a shorter one of which enough is there."""
    if not (own.seconds and given.seconds):  # images of a folder that names no rate
        return ""
    counts = round(own.seconds * own.fps), round(given.seconds * given.fps)
    slack = SAME_SECONDS * own.seconds + 4 * SAME_SECONDS
    times = f"lasts {given.seconds:.2f} s and its clip {own.seconds:.2f} s: frames are matched by time"
    if abs(counts[0] - counts[1]) <= 1 and abs(given.fps / own.fps - 1) > SAME_SECONDS:
        return f"has as many frames as its clip, at {given.fps:.3g} in a second and not {own.fps:.3g}, and {times}"
    return times if given.seconds > own.seconds + slack else ""
