"""Writing samples as files to look at: the pixels that the encoder gets, with their captions."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from ditkit_core.data.dataset import Sample
from ditkit_core.data.masks import MASK
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
    """Write each sample as it is encoded: a clip as .mp4, a still image as .png, captions as .txt
    with empty lines between them.

    Control videos and masks are cropped and trimmed like their clip and written next to it as
    `NAME.COLUMN.mp4`, references as `NAME.reference_0.png`. A png has exactly the encoded pixels,
    rounded to 8 bits; an mp4 is compressed with H.264. Only the files of clips and images are
    returned.
    """
    kinds = {column.name: column.kind for column in columns}
    written = []
    for sample in samples:
        name = _file_name(sample.id)
        written.append(_write(folder, name, sample.media, sample, fps))
        write_text(folder / f"{name}.txt", "\n\n".join(sample.captions) + "\n")
        for column in [control for control in sample.controls if kinds.get(control) == "video"]:
            _write(folder, f"{name}.{column}", Path(sample.controls[column]), sample, fps)
        if sample.mask is not None:
            _write(folder, f"{name}.{MASK.name}", sample.mask, sample, fps, as_stored=True)
        sizes = (
            encoded_sizes(sample.references, reference_size)
            if reference_size and sample.references
            else []
        )
        for number, (path, (height, width)) in enumerate(
            zip(sample.references, sizes, strict=True)
        ):
            image = read_clip(path, frames=1, fps=0.0, height=height, width=width)
            write_image(folder / f"{name}.reference_{number}.png", (image[:, 0] + 1) / 2)
        advance(1.0)
    return written


def _write(
    folder: Path, name: str, path: Path, sample: Sample, fps: float, *, as_stored: bool = False
) -> Path:
    """Write the sample's window of a file: of its own clip, of a control video, or of its mask."""
    read = partial(
        read_clip,
        path,
        height=sample.height,
        width=sample.width,
        as_stored=as_stored,
        crop=sample.crop,
    )
    if media_kind(path) == "image":
        pixels = read(frames=1, fps=0.0)
        write_image(target := folder / f"{name}.png", (pixels[:, 0] + 1) / 2)
        return target
    pixels = read(frames=sample.frames, fps=fps, start_seconds=sample.start_seconds)
    write_video(target := folder / f"{name}.mp4", (pixels + 1) / 2, fps)
    return target


def _file_name(id: str) -> str:
    """An id as a path that stays inside a folder; the id of a clip outside the dataset folder is
    its absolute path."""
    parts = [part.replace(":", "_") for part in PurePosixPath(id).parts if part not in ("/", "..")]
    return "/".join(parts)
