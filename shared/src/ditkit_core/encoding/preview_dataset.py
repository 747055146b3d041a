"""What samples became, as files to look at: the pixels that the encoder is given, with the captions beside them."""

from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import media_kind, read_clip, write_image, write_video
from ditkit_core.data.references import ReferenceSize, encoded_sizes
from ditkit_core.io.console import NullProgress
from ditkit_core.io.files import write_text
from ditkit_core.models.conditions import Column


def dump(
    samples: Sequence[Sample],
    folder: Path,
    *,
    fps: float,
    columns: Sequence[Column] = (),
    reference_size: ReferenceSize | None = None,
    advance: Callable[[float], None] = NullProgress.advance,
) -> list[Path]:
    """Write each sample as it is encoded: a clip as .mp4, a still image as .png, its captions as .txt with an empty line between two.

    Control videos are cut like their clip and lie beside it as `NAME.COLUMN.mp4`, pictures to edit as `NAME.reference_0.png`. A png
    holds the very pixels in 8 bits, an mp4 what H.264 makes of them.

    Args:
        samples: As `scan` lists them.
        folder: Where to write.
        fps: Frames per second that clips are read at.
        columns: Of what goes with clips.
        reference_size: As in `ModelSpec`; needed where samples have references.
        advance: Told 1.0 after each sample.

    Returns:
        The files of the clips and images themselves.

    Raises:
        UserError: If a file cannot be read or written.
    """
    kinds = {column.name: column.kind for column in columns}
    written = []
    for sample in samples:
        name = _file_name(sample.id)
        written.append(_write(folder, name, sample.media, sample, fps))
        write_text(folder / f"{name}.txt", "\n\n".join(sample.captions) + "\n")
        for column in [each for each in sample.controls if kinds.get(each) == "video"]:
            _write(folder, f"{name}.{column}", Path(sample.controls[column]), sample, fps)
        sizes = encoded_sizes(sample.references, reference_size) if reference_size and sample.references else []
        for number, (path, (height, width)) in enumerate(zip(sample.references, sizes, strict=True)):
            picture = read_clip(path, frames=1, fps=0.0, height=height, width=width)
            write_image(folder / f"{name}.reference_{number}.png", (picture[:, 0] + 1) / 2)
        advance(1.0)
    return written


def _write(folder: Path, name: str, path: Path, sample: Sample, fps: float) -> Path:
    """The window of a sample, of its own clip or of what goes with it."""
    size = {"height": sample.height, "width": sample.width}
    if media_kind(path) == "image":
        pixels = read_clip(path, frames=1, fps=0.0, **size)
        write_image(target := folder / f"{name}.png", (pixels[:, 0] + 1) / 2)
        return target
    pixels = read_clip(path, frames=sample.frames, fps=fps, start_seconds=sample.start_seconds, **size)
    write_video(target := folder / f"{name}.mp4", (pixels + 1) / 2, fps)
    return target


def _file_name(id: str) -> str:
    """An id as a path inside a folder, whatever it says: clips from elsewhere have the whole path as id."""
    parts = [part.replace(":", "_") for part in PurePosixPath(id).parts if part not in ("/", "..")]
    return "/".join(parts)
