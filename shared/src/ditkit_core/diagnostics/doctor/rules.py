"""The rules that turn facts about a dataset into findings.

Only `check_boundary_images`, `check_control_videos`, `check_sounds` and `check_silence` read files,
to compare conditions with their clips. Data with such findings can be trained on, but the model
would learn from conditions and clips that do not belong together.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ditkit_core.data.buckets import cut_share, resolutions_of, size_of
from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Sample, shortened_clips
from ditkit_core.data.masks import MASK
from ditkit_core.data.media.clip import Colours, MediaInfo, media_kind, probe, read_clip
from ditkit_core.data.media.packets import SLACK_SECONDS
from ditkit_core.data.media.sound import decode_sound, sound_seconds
from ditkit_core.diagnostics.doctor.findings import (
    BucketRow,
    DatasetName,
    Excluded,
    FileRow,
    Finding,
    Severity,
    listed,
)
from ditkit_core.diagnostics.doctor.media import HD_LINES, WindowLook
from ditkit_core.diagnostics.report.words import plural
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column

UPSCALED = 1.25
"""Factor of upscaling above which a finding is made."""
LEAST_MASK = 0.001
"""Share of a mask's pixels below which it is black everywhere, or white if it is the share of the
others."""
SAME_RATE = 0.95
"""Share of the trained frame rate below which a video's frame rate is too low."""
FROZEN_SECONDS = 1.0
"""Shortest time of a frozen frame that is a finding."""
MOSTLY_KEPT = 0.25
"""Share of a picture that may be cut away without a finding."""
LARGEST_ASPECT = 4.0
"""A picture with a larger ratio of its sides is not worth sizes of its own."""
MOSTLY_UNUSED = 0.5
"""Share of unused frames of a video above which a note is made."""
BLANK_SHARE = 0.1
"""Share of a clip's frames that may be blank: films begin and end with blank frames."""
UNLIKE_LEVELS = 16.0
"""Mean difference, in levels of 0…255, from which an image does not match a frame; resizing and
codecs cause at most 5."""
SAME_SECONDS = 0.05
"""A condition video may be longer than its clip by this share of the clip's length plus four times
this many seconds."""
SILENT = 0.001
"""Root mean square of silence, where full scale is 1: -60 dB, which is below what a quiet room
sounds like next to speech."""
MANY_USES = 250
"""Uses of a sample in a run above which a note is made."""
SAME_SHAPE = 0.03
"""Relative difference that the aspect ratios of a clip and its condition video may have."""

_SIDE = 48  # pixels of the longer side at which images are compared


def file_row(
    file: str, info: MediaInfo, samples: Sequence[Sample], fps: float, dataset: DatasetName = "data"
) -> FileRow:
    """Compute which part of a file is trained.

    Args:
        samples: Its windows, which may overlap.
    """
    is_video = info.kind == "video"
    file_frames = max(1, math.ceil((info.seconds - SLACK_SECONDS) * fps)) if is_video else 1
    # A set: windows may overlap, and each frame counts once.
    trained_frames = {
        round(sample.start_seconds * fps) + i for sample in samples for i in range(sample.frames)
    }
    kept = min(file_frames, len(trained_frames)) if is_video else 1
    return FileRow(
        dataset=dataset,
        file=file,
        samples=len(samples),
        seconds=info.seconds,
        fps=info.fps,
        trained_fps=fps if is_video else 0.0,
        frames=file_frames,
        kept=kept,
        dropped=file_frames - kept,
        height=info.height,
        width=info.width,
        enlarged=max(
            1.0,
            *(max(sample.height / info.height, sample.width / info.width) for sample in samples),
        ),
        ids=tuple(sample.id for sample in samples),
    )


def check_excluded(excluded: Sequence[Excluded], code: str = "D02") -> Iterator[Finding]:
    """Findings about files and samples that are left out, or stop the run."""
    for exclusion in excluded:
        observation, _, remedy = exclusion.reason.rpartition("; ")
        if not observation:
            observation, remedy = exclusion.reason, "fix it or remove it"
        # data.on_bad does not skip a clip that is only too short
        if exclusion.stops and "data.on_bad" not in remedy and "data.short_clips" not in remedy:
            remedy += ', or leave it out: data.on_bad = "skip"'
        severity: Severity = "error" if exclusion.stops else "warning"
        settings: tuple[dict[str, Any], ...] = ({"data.on_bad": "skip"},)
        if "data.short_clips" in remedy:
            settings = ({"data.short_clips": "skip"}, {"data.short_clips": "shorten"})
        yield Finding(
            code,
            exclusion.name,
            observation,
            remedy,
            severity=severity,
            settings=settings if exclusion.stops else (),
        )


def check_file(
    row: FileRow, *, is_hdr: bool = False, lower: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Finding]:
    """Findings about a file's size, frame rate and colour range.

    Args:
        lower: The resolution at which it is hardly upscaled, as of `less_enlarged`.
    """
    if is_hdr:
        observation = "it is an HDR video; training converts it to SDR"
        yield Finding("D10", row.file, observation, "convert it to SDR (BT.709) with tone mapping")
    if row.enlarged > UPSCALED:
        observation = f"{row.width} x {row.height} pixels are upscaled {row.enlarged:.1f} times: the model learns the blur"
        resolution = f"set {_written(lower)}" if lower else "lower data.height and data.width"
        yield Finding(
            "D11",
            row.file,
            observation,
            f"use a larger original, or {resolution}",
            settings=(lower,) if lower else (),
        )
    if row.trained_fps and row.fps < SAME_RATE * row.trained_fps:
        observation = f"{row.fps:.3g} frames per second are trained as {row.trained_fps:g}: frames are repeated, and motion jerks"
        slower = f"set data.fps to {max(1, math.floor(row.fps))} or less, if the model allows it"
        yield Finding("D12", row.file, observation, f"use another original, or {slower}")


def less_enlarged(row: FileRow, data: DataConfig, size_step: int) -> dict[str, Any]:
    """The settings with which a file is upscaled by a quarter at most; empty if it is now, or if
    none does it.

    Of a square, other files keep their resolution; else all get a lower one.

    Args:
        size_step: Height and width are multiples of this many pixels.
    """
    side, scale = min(data.resolutions, default=data.height), UPSCALED / row.enlarged
    while scale < 1 and (lower := math.floor(side * scale / size_step) * size_step):
        changes: dict[str, Any] = {"resolutions": (lower, *(data.resolutions or (data.height,)))}
        if not data.resolutions and data.height != data.width:
            width = max(size_step, math.floor(data.width * scale / size_step) * size_step)
            changes = {"height": lower, "width": width}
        try:
            resolutions = resolutions_of(replace(data, **changes), size_step)
        except UserError:  # no bucket is as small
            return {}
        height, width = size_of(row.height, row.width, resolutions)
        if max(height / row.height, width / row.width) <= UPSCALED:
            return {f"data.{key}": value for key, value in changes.items()}
        scale = (lower - 0.5) / side
    return {}


def check_colours(stored: Mapping[str, Colours]) -> Iterator[Finding]:
    """One note about all files whose colours are converted, and a warning about each whose colours
    cannot be.

    Args:
        stored: The colours of each file that does not store sRGB.
    """
    for file, colours in stored.items():
        if not colours.is_converted:
            observation = f"its colours are read as sRGB, but it has {colours.name}"
            yield Finding(
                "D31", file, observation, "convert it to sRGB, so that it is trained as you see it"
            )
    spaces = Counter(colours.name for colours in stored.values() if colours.is_converted)
    if spaces:
        names = ", ".join(f"{name}: {count}" for name, count in spaces.most_common())
        observation = f"their colours are converted to sRGB, as a viewer shows them ({names})"
        first = next(file for file, colours in stored.items() if colours.is_converted)
        others = spaces.total() - 1
        where = f"{spaces.total()} files ({first}, …)" if others else first
        yield Finding(
            "D30", where, observation, "nothing to do; --dump shows them as they are trained"
        )


def check_matrices(files: Sequence[str], of: int) -> Iterator[Finding]:
    """One note about all HD videos that do not name their matrix of colours, of this number of
    files."""
    if files:
        where = (
            files[0] if len(files) == 1 else f"{len(files)} of {plural(of, 'file')} ({files[0]}, …)"
        )
        observation = f"{HD_LINES} lines or more and no matrix of colours: read as BT.601, as ffmpeg and OpenCV do, not as BT.709"
        remedy = "if players show other reds and greens than --dump, tag it: ffmpeg -i IN -c copy -bsf:v h264_metadata=matrix_coefficients=1 OUT"
        yield Finding("D40", where, observation, remedy)


def check_damaged_rest(file: str, info: MediaInfo, damage: Exception) -> Iterator[Finding]:
    """The finding about a video that is damaged after the part that is trained."""
    observation, _, remedy = str(damage).rpartition("; ")
    readable = f"{observation}; the part that is trained, up to {info.seconds:.2f} s, can be read"
    yield Finding("D27", file, readable, remedy)


def check_coverage(rows: Sequence[FileRow]) -> Iterator[Finding]:
    """One note about all videos with only a small part trained; the table of files has the numbers
    of each."""
    rows_with_unused = [row for row in rows if row.dropped > MOSTLY_UNUSED * row.frames]
    if rows_with_unused:
        kept = sum(row.kept for row in rows_with_unused)
        frames = sum(row.frames for row in rows_with_unused)
        observation = f"{kept} of their {frames} frames are trained on, less than half of each"
        remedy = (
            'raise data.frames, or take several clips of a file: data.windows = "all" or "uniform"'
        )
        yield Finding(
            "D13",
            f"{len(rows_with_unused)} of {len(rows)} files",
            observation,
            remedy,
            settings=({"data.windows": "all"},),
        )


def check_frames(where: str, look: WindowLook, fps: float) -> Iterator[Finding]:
    """Findings about the frames of a window.

    Args:
        fps: Frames per second of the window; 0 for an image.
    """
    if look.cuts:
        times = ", ".join(f"{seconds:.2f} s" for seconds in look.cuts)
        observation = f"another shot begins at {times}: the model learns to cut"
        yield Finding("D06", where, observation, "cut the file there")
    if look.blank > BLANK_SHARE * look.frames:
        kind = "black" if look.is_black else "of one colour"
        observation = (
            f"{look.blank} of {look.frames} frames are {kind}"
            if look.frames > 1
            else f"the image is {kind}"
        )
        yield Finding(
            "D07",
            where,
            observation,
            "cut them off, or remove the clip" if look.frames > 1 else "remove it",
        )
    elif look.is_still:
        observation = f"nothing moves in its {look.frames} frames"
        yield Finding("D08", where, observation, "train it as an image, or remove it")
    if look.frozen_seconds >= FROZEN_SECONDS:
        observation = (
            f"one frame is frozen for {look.frozen_seconds:.1f} s of {look.frames / fps:.1f} s"
        )
        yield Finding("D09", where, observation, "cut it off, or use another original")


def check_duplicates(
    copy_groups: Sequence[Sequence[str]], near_copy_groups: Sequence[Sequence[str]]
) -> Iterator[Finding]:
    """Findings about groups of samples with the same content, or nearly."""
    for group in copy_groups:
        remedy = "keep one, and give it several captions or repeats if it should count more"
        yield Finding("D04", listed(group), "these files have the same content", remedy)
    for group in near_copy_groups:
        yield Finding(
            "D05",
            listed(group),
            "these look nearly alike",
            "keep the best of them, unless this is intended",
        )


def check_fewest_frames(samples: Sequence[Sample], fewest: int) -> Iterator[Finding]:
    """The finding about clips whose frames are all part of the condition.

    Args:
        fewest: `ModelSpec.training.fewest_frames`.
    """
    count = sum(sample.frames < fewest for sample in samples)
    if count:
        observation = (
            f"they have fewer than {fewest} frames, all of which this model is given as a condition"
        )
        remedy = f"train it on clips of {fewest} frames or more, or train a text-to-video model"
        where = f"{count} of {len(samples)} samples"
        yield Finding("D28", where, f"{observation}: next to nothing is left to learn", remedy)


def check_shortened(samples: Sequence[Sample], data: DataConfig, fps: float) -> Iterator[Finding]:
    """One note about all clips that are shorter than the configuration asks for and are trained all
    the same."""
    short = sorted(sample.frames for sample in shortened_clips(samples, data))
    if short:
        shortest = min(data.lengths)
        lengths = f"{short[0]} to {short[-1]}" if short[0] < short[-1] else f"{short[0]}"
        observation = f"they have fewer than {shortest} frames ({shortest / fps:.2g} s at {fps:g} fps), and are trained with what they have: {lengths}"
        remedy = 'for clips of one length lower data.frames, or leave the others out: data.short_clips = "skip"'
        yield Finding(
            "D33",
            f"{len(short)} of {plural(len(samples), 'sample')}",
            observation,
            remedy,
            settings=({"data.short_clips": "skip"},),
        )


def check_crops(samples: Sequence[Sample], data: DataConfig, size_step: int) -> Iterator[Finding]:
    """Findings about files that lose more than a quarter, each file once, with the keys that keep
    more of it.

    Args:
        size_step: Height and width are multiples of this many pixels.
    """
    remedies: dict[tuple[int, int], dict[str, Any]] = {}
    for sample in {sample.media: sample for sample in reversed(samples)}.values():
        if sample.file_size is None:
            continue
        height, width = sample.file_size
        share = cut_share(height, width, (sample.height, sample.width))
        if share > MOSTLY_KEPT:
            middle = (
                min(width, round(height * sample.width / sample.height)),
                min(height, round(width * sample.height / sample.width)),
            )
            observation = (
                f"{share:.0%} of it is cut away: of {width} x {height} pixels the middle "
                f"{middle[0]} x {middle[1]} are trained, as {sample.width} x {sample.height}"
            )
            if (height, width) not in remedies:
                remedies[height, width] = _less_cropped(height, width, data, size_step)
            changes = remedies[height, width]
            remedy = (
                f"set {_written(changes)}, or crop it yourself" if changes else "crop it yourself"
            )
            settings = (changes,) if changes else ()
            yield Finding("D32", str(sample.media), observation, remedy, settings=settings)


def _less_cropped(height: int, width: int, data: DataConfig, size_step: int) -> dict[str, Any]:
    """The fewest settings with which at most a quarter of a picture is cut away; empty if none do
    it."""
    auto: dict[str, Any] = {} if data.buckets else {"buckets": "auto"}
    aspect = max(height, width) / min(height, width)
    wide = (
        {"max_aspect": math.ceil(aspect * 10) / 10}
        if data.max_aspect < aspect <= LARGEST_ASPECT
        else {}
    )
    for changes in (
        auto,
        auto | wide,
        auto | {"bucket_step": size_step},
        auto | wide | {"bucket_step": size_step},
    ):
        size = size_of(height, width, resolutions_of(replace(data, **changes), size_step))
        if changes and cut_share(height, width, size) <= MOSTLY_KEPT:
            return {f"data.{key}": value for key, value in changes.items()}
    return {}


def _written(settings: Mapping[str, Any]) -> str:
    """Settings as a run file has them, in a sentence."""
    return " and ".join(
        f"{key} = {f'{value:g}' if isinstance(value, int | float) else json.dumps(value)}"
        for key, value in settings.items()
    )


def check_buckets(rows: Sequence[BucketRow]) -> Iterator[Finding]:
    """Notes about shapes with fewer samples than a micro-batch has."""
    for row in rows:
        trained = row.samples - row.held_out if row.dataset == "data" else 0
        if row.batch_size and 0 < trained < row.batch_size and len(rows) > 1:
            observation = f"{plural(trained, 'sample')} of this shape, and a micro-batch has {row.batch_size}: it runs smaller"
            remedy = "add samples of this shape, or make data.bucket_step larger"
            yield Finding("D17", f"{row.frames} x {row.height} x {row.width}", observation, remedy)


def check_uses(rows: Sequence[BucketRow], micro_batches: int) -> Iterator[Finding]:
    """The note that each sample is used very often.

    Args:
        micro_batches: Of the whole run.
    """
    trained = sum(row.samples - row.held_out for row in rows)
    epoch = sum(row.micro_batches or 0 for row in rows)
    if epoch and micro_batches > MANY_USES * epoch:
        where = plural(trained, "sample")
        observation = f"the run uses each {micro_batches / epoch:,.0f} times: it learns these by heart, and little in general"
        remedy = "add images or clips, or lower train.steps and look at samples on the way (sample.every_steps)"
        yield Finding("D35", where, observation, remedy)


def check_boundary_images(
    sample: Sample, columns: Sequence[Column], fps: float
) -> Iterator[Finding]:
    """Findings about first and last images that differ from the clip's first or last frame.

    Args:
        sample: The clip; its conditions have been read without an error.
        fps: Frames per second of the clip; 0 for a still image.
    """
    scale = _SIDE / max(sample.height, sample.width)
    height, width = max(1, round(sample.height * scale)), max(1, round(sample.width * scale))
    for column in columns:
        # A clip of one frame has no end that could differ from its beginning.
        is_used = column.moment == "begin" or (column.moment == "end" and sample.frames > 1)
        if not is_used or column.name not in sample.controls:
            continue
        # Both go through training's own reader, so that cropping and colours cannot make a
        # difference.
        path = sample.controls[column.name]
        seconds = sample.start_seconds + (
            (sample.frames - 1) / fps if column.moment == "end" and fps else 0.0
        )
        clip_image = read_clip(
            sample.media,
            frames=1,
            fps=fps or 1.0,
            height=height,
            width=width,
            start_seconds=seconds,
        )
        condition_image = read_clip(Path(path), frames=1, fps=1.0, height=height, width=width)
        levels = 127.5 * float((clip_image - condition_image).abs().mean())
        if levels >= UNLIKE_LEVELS:
            frame = (
                f"the last of its {sample.frames} frames"
                if column.moment == "end"
                else "its first frame"
            )
            observation = (
                f"{column.name} {path} does not look like {frame} ({levels:.0f} levels apart)"
            )
            remedy = "name the right image, cut the file so that it fits, or leave the column empty"
            yield Finding("D18", sample.id, observation, remedy)


def check_control_videos(sample: Sample, columns: Sequence[Column]) -> Iterator[Finding]:
    """Findings about control videos and masks that do not match their clip in time or shape."""
    files = {
        **sample.controls,
        **({MASK.name: str(sample.mask)} if sample.mask is not None else {}),
    }
    for column in (*columns, MASK):
        path = Path(files[column.name]) if column.name in files else None
        if path is None or column.kind != "video":
            continue
        try:
            clip, control = probe(sample.media), probe(path)
        except UserError:
            # damaged after the part that is used; `check_damaged_rest` reports it for the clip
            continue
        where, control_name = sample.media.name, f"{column.name} {path}"
        if media_kind(path) == "video" and (time_difference := _out_of_step(clip, control)):
            remedy = "give it the frame rate of the clip (ffmpeg -r RATE -i IN -r RATE OUT.mp4), or cut it like the clip"
            yield Finding("D19", where, f"{control_name} {time_difference}", remedy)
        ratio = (control.width * clip.height) / (control.height * clip.width)
        if abs(ratio - 1) > SAME_SHAPE:
            sizes = f"{control.width} x {control.height} and its clip {clip.width} x {clip.height}"
            reason = "each is centre-cropped separately, so that they do not align"
            yield Finding(
                "D19",
                where,
                f"{control_name} is {sizes}: {reason}",
                "give both the same aspect ratio",
            )


def _sounds(sample: Sample, columns: Sequence[Column]) -> Iterator[tuple[Column, str, Path]]:
    """The sounds of a sample: for each, its column, what a message calls it, and its file."""
    has_track = media_kind(sample.media) == "video" and not sample.media.is_dir()
    for column in columns:
        if column.kind == "audio" and column.name in sample.controls:
            path = Path(sample.controls[column.name])
            yield column, f"{column.name} {path}", path
        elif column.in_step and has_track:
            yield column, "its sound track", sample.media


def check_silence(sample: Sample, columns: Sequence[Column], fps: float) -> Iterator[Finding]:
    """Findings about sounds that are silent during their clip, and so teach the model that they
    mean nothing."""
    end = sample.start_seconds + sample.frames / fps
    for _, name, path in _sounds(sample, columns):
        try:
            sound, rate = decode_sound(path, until_seconds=end)
        except UserError:  # a table of features; sound that cannot be read is refused before
            continue
        part = sound[round(sample.start_seconds * rate) :]
        if len(part) and math.sqrt(float(np.square(part, dtype=np.float64).mean())) < SILENT:
            observation = f"{name} is silent from {sample.start_seconds:.2f} s to {end:.2f} s: the model learns nothing from it"
            remedy = "give it the right sound (of several tracks the first is read), make it louder, or remove the clip"
            yield Finding("D34", sample.id, observation, remedy)


def check_sounds(sample: Sample, columns: Sequence[Column]) -> Iterator[Finding]:
    """Findings about sounds that have to be in step with their clip, and last longer or shorter:
    given files, or the clip's own sound track."""
    for column, name, path in _sounds(sample, columns):
        if not column.in_step or media_kind(sample.media) != "video" or sample.media.is_dir():
            continue
        try:
            clip, sound = probe(sample.media).seconds, sound_seconds(path)
        except UserError:  # what is used of it has been read without an error
            continue
        if clip and sound and abs(sound - clip) > SAME_SECONDS * clip + 4 * SAME_SECONDS:
            observation = f"{name} lasts {sound:.2f} s and its clip {clip:.2f} s: they are matched by time, from the start"
            remedy = "check that they are in step; cut or stretch the sound like the clip"
            yield Finding("D19", sample.media.name, observation, remedy)


def check_mask(sample: Sample, share: float, outside: float) -> Iterator[Finding]:
    """The finding about a loss mask that separates nothing.

    Args:
        share: Share of its mask's pixels that is white.
        outside: `train.mask_weight`.
    """
    if share < LEAST_MASK:
        lost = (
            "nothing of it is learnt" if outside == 0 else f"all of it has the weight {outside:g}"
        )
        remedy = "paint what is learnt white (transparency counts as white), or remove the mask"
        yield Finding(
            "D29", sample.id, f"its mask {sample.mask} is black everywhere: {lost}", remedy
        )
    elif share > 1 - LEAST_MASK:
        remedy = "paint what is not learnt black (transparency counts as white), or remove the mask"
        yield Finding(
            "D29",
            sample.id,
            f"its mask {sample.mask} is white everywhere: it is learnt as without one",
            remedy,
        )


def _out_of_step(clip: MediaInfo, control: MediaInfo) -> str:
    """How a video's timing differs from its clip's; empty if it does not, or if the video is
    shorter: the loader checks its length."""
    if not (clip.seconds and control.seconds):  # images of a folder that names no rate
        return ""
    # As many frames at another rate: it was written without the clip's rate, and fits frame by
    # frame but not by time.
    counts = round(clip.seconds * clip.fps), round(control.seconds * control.fps)
    slack = SAME_SECONDS * clip.seconds + 4 * SAME_SECONDS
    times = f"lasts {control.seconds:.2f} s and its clip {clip.seconds:.2f} s: frames are matched by time"
    if abs(counts[0] - counts[1]) <= 1 and abs(control.fps / clip.fps - 1) > SAME_SECONDS:
        return f"has as many frames as its clip, at {control.fps:.3g} in a second and not {clip.fps:.3g}, and {times}"
    return times if control.seconds > clip.seconds + slack else ""


def same_content(hashes: Mapping[str, tuple[str, Path]]) -> list[tuple[str, ...]]:
    """Groups of samples whose files differ but have the same content.

    Args:
        hashes: Maps each sample to the content hash and the path of its file.
    """
    groups: dict[str, dict[Path, str]] = defaultdict(dict)
    for id, (content, file) in hashes.items():
        # Windows of one file share its hash, but are no copies of each other.
        groups[content].setdefault(file, id)
    return [tuple(files.values()) for files in groups.values() if len(files) > 1]
