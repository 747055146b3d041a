"""From facts about a dataset to what the doctor says of them. Nothing here reads a file."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ditkit_core.data.dataset import Sample
from ditkit_core.data.media.clip import MediaInfo
from ditkit_core.data.media.timestamps import SLACK_SECONDS
from ditkit_core.diagnostics.doctor.findings import (
    BucketRow,
    CaptionRow,
    CutCaption,
    DatasetName,
    Excluded,
    FileRow,
    Finding,
)
from ditkit_core.diagnostics.doctor.media import Look

UPSCALED = 1.25
"""How much larger a picture may be made before it is said."""
SAME_RATE = 0.95
"""Share of the trained frame rate that a video may lack."""
FROZEN_SECONDS = 1.0
MOSTLY_UNUSED = 0.5
"""Share of a video's frames that, left out, is worth a note."""
SAME_CAPTION_SHARE = 0.5
"""Share of the samples that may have one caption."""
BLANK_SHARE = 0.1
"""Share of a clip's frames that may be blank: films begin and end with some."""


def file_row(
    file: str, info: MediaInfo, samples: Sequence[Sample], fps: float, dataset: DatasetName = "data"
) -> FileRow:
    """What is trained of a file.

    Args:
        file: Its name.
        info: What it holds.
        samples: Its windows, which may overlap.
        fps: Frames per second that videos are read at.
        dataset: Which it is of.
    """
    is_video = info.kind == "video"
    there = max(1, math.ceil((info.seconds - SLACK_SECONDS) * fps)) if is_video else 1
    used = {round(sample.start_seconds * fps) + i for sample in samples for i in range(sample.frames)}
    kept = min(there, len(used)) if is_video else 1
    return FileRow(
        dataset=dataset, file=file, samples=len(samples), seconds=info.seconds, fps=info.fps, trained_fps=fps if is_video else 0.0,
        frames=there, kept=kept, dropped=there - kept, height=info.height, width=info.width,
        enlarged=max(1.0, *(max(each.height / info.height, each.width / info.width) for each in samples)),
    )  # fmt: skip


def of_excluded(excluded: Sequence[Excluded], code: str = "D02") -> Iterator[Finding]:
    """What is left out, or stops the run."""
    for each in excluded:
        what, _, remedy = each.reason.rpartition("; ")
        if not what:
            what, remedy = each.reason, "mend it or remove it"
        if each.stops:
            remedy += ', or leave it out: data.on_bad = "skip"' * ("data.on_bad" not in remedy)
        # a reason begins with the file that it is about
        where, what = ("", what) if each.name in what else (each.name, what)
        yield Finding(
            code=code, severity="error" if each.stops else "warning", where=where, what=what, remedy=remedy
        )  # fmt: skip


def of_file(row: FileRow, *, is_hdr: bool = False) -> Iterator[Finding]:
    """What a file's size, rate and length say."""
    if is_hdr:
        yield Finding(
            code="D10", severity="warning", where=row.file,
            what="it is an HDR video, and is trained on as the SDR pictures that it is converted to",
            remedy="convert it to SDR (BT.709) with tone mapping",
        )  # fmt: skip
    if row.enlarged > UPSCALED:
        yield Finding(
            code="D11", severity="warning", where=row.file,
            what=f"{row.width} x {row.height} pixels are enlarged {row.enlarged:.1f} times: the model learns the blur",
            remedy="use a larger original, or lower data.height and data.width",
        )  # fmt: skip
    if row.trained_fps and row.fps < SAME_RATE * row.trained_fps:
        yield Finding(
            code="D12", severity="warning", where=row.file,
            what=f"{row.fps:.3g} frames per second are trained as {row.trained_fps:g}: frames are repeated, and motion jerks",
            remedy=f"use another original, or set data.fps to {max(1, math.floor(row.fps))} or less, as far as the model takes it",
        )  # fmt: skip


def of_rest(file: str, info: MediaInfo, error: Exception) -> Iterator[Finding]:
    """A video that is damaged behind what is trained of it, of which no more is known."""
    what, _, remedy = str(error).rpartition("; ")
    yield Finding(
        code="D27", severity="warning", where="" if file in what else file,
        what=f"{what}; what is trained of it, up to {info.seconds:.2f} s, can be read", remedy=remedy,
    )  # fmt: skip


def of_unused(rows: Sequence[FileRow]) -> Iterator[Finding]:
    """Videos that are trained on in small part, in one note: their table has the numbers of each."""
    mostly = [row for row in rows if row.dropped > MOSTLY_UNUSED * row.frames]
    if mostly:
        kept, frames = sum(row.kept for row in mostly), sum(row.frames for row in mostly)
        yield Finding(
            code="D13", severity="note", where=f"{len(mostly)} of {len(rows)} files",
            what=f"{kept} of their {frames} frames are trained on, less than half of each",
            remedy='raise data.frames, or take several clips of a file: data.windows = "all" or "uniform"',
        )  # fmt: skip


def of_look(where: str, look: Look, fps: float) -> Iterator[Finding]:
    """What a window shows.

    Args:
        where: The sample.
        look: What was seen.
        fps: Frames per second of the window; 0 for an image.
    """
    if look.cuts:
        times = ", ".join(f"{seconds:.2f} s" for seconds in look.cuts)
        yield Finding(
            code="D06", severity="warning", where=where,
            what=f"another shot begins at {times}: the model learns to cut", remedy="cut the file there",
        )  # fmt: skip
    if look.blank > BLANK_SHARE * look.frames:
        kind = "black" if look.is_black else "of one colour"
        what = f"{look.blank} of {look.frames} frames are {kind}" if look.frames > 1 else f"the picture is {kind}"
        yield Finding(code="D07", severity="warning", where=where, what=what, remedy="remove it, or cut them off")
    elif look.is_still:
        yield Finding(
            code="D08", severity="warning", where=where, what=f"nothing moves in its {look.frames} frames",
            remedy="train it as a picture, or remove it",
        )  # fmt: skip
    if look.frozen_seconds >= FROZEN_SECONDS:
        yield Finding(
            code="D09", severity="warning", where=where,
            what=f"one picture stays for {look.frozen_seconds:.1f} s of {look.frames / fps:.1f} s",
            remedy="cut it off, or use another original",
        )  # fmt: skip


def of_duplicates(same: Sequence[Sequence[str]], alike: Sequence[Sequence[str]]) -> Iterator[Finding]:
    """Groups of samples that are the same, or nearly."""
    for group in same:
        yield Finding(
            code="D04", severity="warning", where=_listed(group), what="these files have the same content",
            remedy="keep one, and give it several captions or repeats if it is to weigh more",
        )  # fmt: skip
    for group in alike:
        yield Finding(
            code="D05", severity="warning", where=_listed(group), what="these look nearly alike",
            remedy="keep the best of them, unless it is meant",
        )  # fmt: skip


def captions_of(samples: Sequence[Sample], cut: Sequence[CutCaption] | None) -> CaptionRow:
    """All captions together, with those that are cut."""
    captions = [caption for sample in samples for caption in sample.captions]
    empty = sum(not caption.strip() for caption in captions)
    return CaptionRow(
        count=len(captions), distinct=len(set(captions)), empty=empty, cut=None if cut is None else tuple(cut)
    )


def of_captions(samples: Sequence[Sample], row: CaptionRow, class_pictures: Sequence[Sample] = ()) -> Iterator[Finding]:
    """What is likely to be wrong with captions; class pictures may share one, which says what they are."""
    for cut in row.cut or ():
        yield Finding(
            code="D14", severity="warning", where=cut.sample,
            what=f"the text encoder does not read the last {cut.tokens} tokens of its caption, behind {_end(cut.kept)}",
            remedy="shorten the caption",
        )  # fmt: skip
    if empty := [each.id for each in (*samples, *class_pictures) for text in each.captions if not text.strip()]:
        yield Finding(
            code="D16", severity="warning", where=_listed(empty), what="its caption is empty" if len(empty) == 1 else "their captions are empty",
            remedy="write one; for training without captions set train.caption_dropout",
        )  # fmt: skip
    using: dict[str, set[Path]] = defaultdict(set)  # files: windows of one cannot but share
    for sample in samples:
        for caption in filter(None, map(str.strip, sample.captions)):
            using[caption].add(sample.media)
    files = len({sample.media for sample in samples})
    for caption, its in using.items():
        if len(its) > max(1, SAME_CAPTION_SHARE * files):
            yield Finding(
                code="D15", severity="note", where=f"{len(its)} of {files} files",
                what=f"they share the caption {_beginning(caption)}", remedy="describe what differs between them",
            )  # fmt: skip


def of_told(samples: Sequence[Sample], fewest: int) -> Iterator[Finding]:
    """Clips that a model is told as a whole.

    Args:
        samples: All that is trained on.
        fewest: `ModelSpec.fewest_frames`.
    """
    count = sum(sample.frames < fewest for sample in samples)
    if count:
        yield Finding(
            code="D28", severity="warning", where=f"{count} of {len(samples)} samples",
            what=f"they have fewer than {fewest} frames, all of which this model is given as a condition: next to nothing is left to learn",
            remedy=f"train it on clips of {fewest} frames or more, or train a text-to-video model",
        )  # fmt: skip


def of_buckets(rows: Sequence[BucketRow]) -> Iterator[Finding]:
    """Shapes that are too few for a micro-batch."""
    for row in rows:
        trained = row.samples - row.held_out if row.dataset == "data" else 0
        if row.batch_size and 0 < trained < row.batch_size and len(rows) > 1:
            yield Finding(
                code="D17", severity="note", where=f"{row.frames} x {row.height} x {row.width}",
                what=f"{trained} samples have this shape, and a micro-batch has {row.batch_size}: it runs smaller",
                remedy="add samples of this shape, or make data.bucket_step larger",
            )  # fmt: skip


def same_content(hashes: Mapping[str, tuple[str, Path]]) -> list[tuple[str, ...]]:
    """Groups of samples of different files with one content.

    Args:
        hashes: By sample, the content hash and the file.
    """
    groups: dict[str, dict[Path, str]] = defaultdict(dict)
    for id, (content, file) in hashes.items():
        groups[content].setdefault(file, id)
    return [tuple(files.values()) for files in groups.values() if len(files) > 1]


def _listed(names: Sequence[str], most: int = 5) -> str:
    """Names on one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _beginning(text: str, most: int = 60) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= most else text[:most] + "…")


def _end(text: str, most: int = 40) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= most else "…" + text[-most:])
