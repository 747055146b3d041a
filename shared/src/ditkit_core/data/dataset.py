"""Scanning dataset folders into a checked list of samples: errors are found here, before hours of
encoding."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from ditkit_core.data.buckets import Resolution, Size, resolutions_of, size_of
from ditkit_core.data.captions import captions_of
from ditkit_core.data.config import DataConfig, folder_error
from ditkit_core.data.control_files import (
    Control,
    checked_control,
    control_folders,
    controls_by_name,
    text_of,
)
from ditkit_core.data.discovery import list_records, names_of
from ditkit_core.data.masks import MASK, checked_mask
from ditkit_core.data.media.clip import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    available,
    called_like_media,
    media_kind,
)
from ditkit_core.data.media.crop import CENTRE, Crop
from ditkit_core.data.media.files import is_folder, status
from ditkit_core.data.media.image_sequence import check_inside
from ditkit_core.data.metadata import Reader, Record
from ditkit_core.data.references import checked_references, references_by_name
from ditkit_core.data.windows import Window, longest_that_fits, windows_of
from ditkit_core.errors import EnvironmentFault, UserError, argument, printable
from ditkit_core.io.files import inside
from ditkit_core.models.conditions import Column
from ditkit_core.models.spec import DataSpec


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One clip to train on."""

    id: str
    """Path relative to the dataset folder, without extension, with forward slashes. If a file has
    several windows, `#0`, `#1`, … follow; if there are several folders, the folder's name comes
    first."""
    media: Path
    captions: tuple[str, ...]
    """At least one; whatever needs a single caption takes the first."""
    frames: int
    """Frames to read; 1 for a still image."""
    height: int
    """Pixels after resizing; likewise `width`."""
    width: int
    file_size: Size | None = None
    """Height and width of its file in pixels, upright; None if they are not known."""
    references: tuple[Path, ...] = ()
    """Reference images, in order; the caption is then the instruction that edits them into this
    image."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """Conditions of the clip by column: the path of a file, or a text."""
    mask: Path | None = None
    """Loss mask: white where the clip is learnt. None learns all of it."""
    start_seconds: float = 0.0
    """Time of the first frame in seconds, counted from the file's first frame."""
    repeats: float = 1.0
    """Average number of uses per epoch."""
    is_mirrored: bool = False
    crop: Crop = CENTRE
    """Where its file is cropped."""


Why = Literal["bad", "short", "unused"]
"""Why a file is left out: it cannot be used (`data.on_bad`), it has too few frames
(`data.short_clips`), or no sample uses it."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The usable samples of a dataset, and the files that were left out."""

    samples: list[Sample]
    """Sorted by id."""
    excluded: list[tuple[str, str]]
    """Each file (or line of the metadata) that was left out, with the message."""
    fps: float
    kinds: list[Why] = field(default_factory=list)
    """The kind of reason for each item of `excluded`, in the same order."""

    @property
    def captions(self) -> list[str]:
        """The first caption of each sample."""
        return [sample.captions[0] for sample in self.samples]


class ShortClip(UserError):
    """A clip has fewer frames than the configuration asks for."""


_MOST_REASONS = 3
"""Failures that a message quotes; the rest is only counted."""


class NothingToTrain(UserError):
    """A dataset has no usable sample."""

    def __init__(self, message: str, excluded: list[tuple[str, str]], kinds: list[Why]):
        """Store the message and, like `Dataset`, the files that were left out and the kinds of
        reasons."""
        super().__init__(message)
        self.excluded, self.kinds = excluded, kinds

    @classmethod
    def after(cls, failed: Sequence[tuple[str, str]]) -> "NothingToTrain":
        """The error for a dataset whose samples were all listed but could not be encoded; `failed`
        has (name, reason) of each."""
        first = "; ".join(f"{name}: {reason}" for name, reason in failed[:_MOST_REASONS])
        more = f"; and {len(failed) - _MOST_REASONS} more" if len(failed) > _MOST_REASONS else ""
        message = f"none of {len(failed)} samples can be encoded, so there is nothing to train on ({first}{more}); fix these"
        return cls(message, list(failed), ["bad"] * len(failed))


class NoReferences(UserError):
    """A sample has references, but the model takes none. `data.on_bad` does not skip it: the whole
    dataset is the wrong one."""


def scan(
    config: DataConfig,
    spec: DataSpec,
    columns: Sequence[Column] = (),
    *,
    key: str = "data.folder",
) -> Dataset:
    """Check the folders of a dataset and list its samples, and the files that are left out.

    Args:
        spec: What the model takes; its frame rate is used if the configuration sets none.
        columns: The dataset columns that the model is conditioned on.
        key: What messages call the folder.
    """
    config = config.with_home()
    folders, key = (config.folders, "data.folders") if config.folders else ((config.folder,), key)
    for folder in folders:
        _check_folder(folder, key, config)
    config.check_steps(spec.frame_step, spec.size_step)
    samples: list[Sample] = []
    left_out: list[_LeftOut] = []
    read_from: dict[str, str] = {}
    names: set[str] = set()
    for number, (folder, prefix) in enumerate(zip(folders, names_of(folders), strict=True)):
        reader = _Reader(
            config=replace(
                config, folder=folder, folders=(), repeats=config.repeats[number : number + 1]
            ),
            spec=spec,
            fps=config.fps or spec.fps,
            columns=columns,
            resolutions=resolutions_of(config, spec.size_step),
            prefix=prefix,
        )
        folder_samples, not_used = _scan_folder(reader, key, names)
        _check_read_once(folder_samples, folder, read_from)
        samples += folder_samples
        left_out += not_used
    config.check_names(names)
    return Dataset(
        samples=sorted(samples, key=lambda sample: sample.id),
        excluded=[exclusion[:2] for exclusion in left_out],
        kinds=[exclusion.kind for exclusion in left_out],
        fps=config.fps or spec.fps,
    )


def _check_read_once(samples: Sequence[Sample], folder: str, read_from: dict[str, str]) -> None:
    """Refuse a clip that another folder has as well; `read_from` is the folder of each file so far,
    and is updated."""
    for sample in samples:
        # The same clip under two ids could be in the validation set under one and trained on under
        # the other.
        if (other := read_from.setdefault(os.path.abspath(sample.media), folder)) != folder:
            raise UserError(
                f"{sample.media} is read from {other} and again from {folder}; name folders that "
                f"do not overlap in {argument('data.folders')}, and raise a number in "
                f"{argument('data.repeats')} to use clips more often"
            )


class _LeftOut(NamedTuple):
    """A file or line that was left out."""

    name: str
    reason: str
    kind: Why


def _scan_folder(
    reader: "_Reader", key: str, names: set[str]
) -> tuple[list[Sample], list[_LeftOut]]:
    """The samples of one folder, and the files that were left out, but for the files in `data.exclude`;
    the names of all media files are added to `names`."""
    config, folder = reader.config, Path(reader.config.folder)
    control_paths = control_folders(config.controls, reader.columns, config.masks)
    for name, control_folder in control_paths.items():
        if control_folder.resolve() == folder.resolve():
            setting = "data.masks" if name == MASK.name else f"data.controls {name}"
            raise UserError(
                f"{setting} is {key} {folder} itself; put the files into a folder of their own"
            )
    by_id, unread = _entries_by_id(reader, control_paths)
    references, unused = references_by_name(config, by_id)
    controls, also_unused = controls_by_name(control_paths, (*reader.columns, MASK), by_id, folder)
    samples: list[Sample] = []
    problems: list[tuple[str, UserError]] = []
    names |= {reader.prefix + entry.media for entries in by_id.values() for entry in entries}
    for id, entries in sorted(by_id.items()):
        entries = [e for e in entries if reader.prefix + e.media not in config.exclude]
        if not entries:
            continue
        try:
            samples += reader.samples(id, entries, references.get(id, ()), controls.get(id, {}))
        except UserError as error:
            problems.append((entries[0].media, error))
    # a.mp4 with two windows makes a#0 and a#1, which could also be the id of a file named a#0.mp4.
    media = {sample.id: sample.media for sample in samples}
    for sample in samples:
        if media[sample.id] != sample.media:
            raise UserError(
                f"{sample.media} and {media[sample.id]} both get the sample id {sample.id!r} (#0, "
                f"#1, … number windows); rename one of the files"
            )
    _stop_at(config, [error for _, error in problems])
    left_out = [
        _LeftOut(
            printable(f"{reader.prefix}{name}"),
            str(error),
            "short" if isinstance(error, ShortClip) else "bad",
        )
        for name, error in problems
    ]
    left_out += [
        _LeftOut(printable(name), "no sample has this name", "unused")
        for name in unused + also_unused
    ]
    left_out += [
        _LeftOut(printable(f"{reader.prefix}{name}"), reason, "unused") for name, reason in unread
    ]
    # With nothing left a run would fail later and less clearly, so even data.on_bad = "skip" does
    # not go on here.
    if not samples:
        accepted = " ".join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))
        reason = (
            f"first of {len(problems)}: {problems[0][1]}"
            if problems
            else f"all are in {argument('data.exclude')}"
            if by_id
            else f"no media file; accepted: {accepted}"
        )
        message = f"{key} {folder} has no usable sample ({reason})"
        raise NothingToTrain(
            message,
            [exclusion[:2] for exclusion in left_out],
            [exclusion.kind for exclusion in left_out],
        )
    return samples, left_out


def _entries_by_id(
    reader: "_Reader", control_paths: Mapping[str, Path]
) -> tuple[dict[str, list[Record]], list[tuple[str, str]]]:
    """The records of a folder by sample id, and the files that are not read, by cause.

    Two records with one id are reported later, as an error of that sample.
    """
    config, folder = reader.config, Path(reader.config.folder)
    lines = Reader(
        folder=folder,
        allow_outside=config.allow_outside,
        captions=config.captions,
        # These folders may be inside the dataset folder, and their files are not samples.
        skip=[*([Path(config.references)] if config.references else []), *control_paths.values()],
        columns=reader.columns,
        edits=reader.spec.reference_size is not None,
        image_folders=config.image_folders,
    )
    by_id: dict[str, list[Record]] = defaultdict(list)
    records, unread = list_records(lines, config.metadata)
    for entry in records:
        by_id[_identifier(folder, entry)].append(entry)
    return by_id, unread


def _check_folder(folder: str, key: str, config: DataConfig) -> None:
    if not folder or not is_folder(Path(folder)):
        raise folder_error(folder, key)
    references = Path(config.references)
    if config.references and status(references) and references.resolve() == Path(folder).resolve():
        raise UserError(
            f"{argument('data.references')} is {key} {folder} itself; put the references into a "
            f"folder of their own"
        )


def shortened_clips(samples: Sequence[Sample], config: DataConfig) -> list[Sample]:
    """The clips that have fewer frames than the configuration asks for."""
    short = [sample for sample in samples if sample.frames < min(config.lengths)]
    return [sample for sample in short if sample.frames > 1 or media_kind(sample.media) == "video"]


def _identifier(folder: Path, entry: Record) -> str:
    """The sample id of a record; of a broken one a text that no sample has."""
    if entry.problem is not None:
        return f"{entry.media}\n"
    path = Path(os.path.normpath(folder / entry.media))
    # Metadata may name a file by its absolute path, with the folder as configured or with its links
    # resolved.
    for root in (os.path.normpath(folder), folder.resolve()):
        if path.is_relative_to(root):
            path = path.relative_to(root)
    if not path.name:  # the record names the dataset folder itself
        return entry.media
    return (path.with_suffix("") if called_like_media(path) else path).as_posix()


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Checks the records of one folder, one by one."""

    config: DataConfig
    spec: DataSpec
    fps: float
    columns: Sequence[Column]
    resolutions: Sequence[Resolution]
    prefix: str
    """Start of every sample id: the folder's name if there are several folders."""

    def samples(
        self,
        id: str,
        entries: list[Record],
        references: tuple[str, ...] | UserError,
        controls: Mapping[str, Control],
    ) -> list[Sample]:
        """Check one record, and make a sample for each of its windows.

        Args:
            id: Sample id without the folder's name.
            entries: The records with this id; more than one is an error.
            references: Its images in `data.references`, or the reason why they cannot be used.
            controls: Its files in `data.controls` by column.
        """
        entry, folder = entries[0], Path(self.config.folder)
        _check_single(id, entries, folder)
        if entry.problem is not None:
            raise entry.problem
        _check_name(id)
        inside(folder, entry.media, allow_outside=self.config.allow_outside)
        # Keep the link, not its target: caches of downloaded datasets link to files without
        # extensions.
        media = folder / entry.media
        if (kind := media_kind(media)) == "video" and self.spec.frame_step == 0:
            raise UserError(
                f"{media} is a video, but this model takes still images; convert it to images or "
                f"remove it"
            )
        if media.is_dir() and not called_like_media(media):
            if not self.config.image_folders:
                raise UserError(
                    f"{media} is a folder; set {argument('data.image_folders')} = true to read its "
                    f"images as one clip"
                )
            check_inside(media, folder, allow_outside=self.config.allow_outside)
        # Opened here, before `encoding` hashes and decodes the file, so that errors show before
        # anything slow begins. If only the first window is used, its timestamps are enough.
        all_windows = self.config.windows != "first"
        extent = available(
            media, self.fps, at_most=None if all_windows else max(self.config.lengths)
        )
        height, width = size_of(extent.height, extent.width, self.resolutions)
        windows = [Window(0, 0, 1)] if kind == "image" else self._windows(media, id, extent.frames)
        mask = self._control(MASK, media, entry, controls, windows)
        whole_file = Sample(
            id=f"{self.prefix}{id}",
            media=media,
            captions=captions_of(entry.captions, self.config),
            height=height,
            width=width,
            file_size=(extent.height, extent.width),
            frames=1,
            references=self._references(media, entry, references),
            controls={
                column.name: control
                for column in self.columns
                if (control := self._control(column, media, entry, controls, windows)) is not None
            },
            mask=None
            if mask is None
            else checked_mask(Path(mask), media, (extent.height, extent.width)),
            repeats=(*self.config.repeats, 1.0)[0],
            crop=self.config.crop_of(self.prefix + entry.media),
        )
        samples = []
        for window in windows:
            name = f"{whole_file.id}#{window.number}" if len(windows) > 1 else whole_file.id
            start = window.first / self.fps if window.first else 0.0
            samples.append(replace(whole_file, id=name, frames=window.frames, start_seconds=start))
        return samples

    def _windows(self, media: Path, id: str, available_frames: int) -> list[Window]:
        if longest_that_fits(available_frames, self.config.lengths):
            return windows_of(available_frames, self.config, f"{self.prefix}{id}")
        shortest = min(self.config.lengths)
        frames = 1 + (available_frames - 1) // self.spec.frame_step * self.spec.frame_step
        if self.config.short_clips != "shorten":
            name = "data.frame_buckets" if self.config.frame_buckets else "data.frames"
            remedy = (
                f"add {frames} to {name}" if self.config.frame_buckets else f"set {name} = {frames}"
            )
            raise ShortClip(
                f"{media} has {available_frames} frames at {self.fps:g} fps, but {name} asks for "
                f"{shortest}; "
                f'{remedy}, or set data.short_clips = "shorten" or "skip"'
            )
        return [Window(0, 0, frames)]

    def _control(
        self,
        column: Column,
        media: Path,
        entry: Record,
        named: Mapping[str, Control],
        windows: Sequence[Window],
    ) -> str | None:
        """The path of a file, or the text, that a clip has in a column."""
        entry_control, other = entry.controls.get(column.name), named.get(column.name)
        folder, name = other or Control(Path(self.config.folder), entry_control or "")
        if isinstance(name, UserError):
            raise name
        if entry_control is not None and other is not None:
            sources = (
                "of its own and in data.masks"
                if column is MASK
                else "in the metadata and in data.controls"
            )
            raise UserError(f"{media} has {column.name} {sources}; remove one of the two")
        if entry_control is None and other is None:
            if column.required:
                raise UserError(
                    f"{media} has no {column.name}, which this model requires; add it to the "
                    f"metadata, or to {argument('data.controls')}"
                )
            return None
        if other is not None and column.kind == "text":
            name = text_of(folder, name, allow_outside=self.config.allow_outside)
        return checked_control(
            folder,
            name,
            column,
            allow_outside=self.config.allow_outside,
            fps=self.fps,
            windows=windows,
        )

    def _references(
        self, media: Path, entry: Record, named: tuple[str, ...] | UserError
    ) -> tuple[Path, ...]:
        if isinstance(named, UserError):
            raise named
        if not (entry.references or named):
            if self.spec.needs_references:
                raise UserError(
                    f"{media} has no reference, and this model edits images; put one of its name "
                    f"into {argument('data.references')}, or name it in the metadata"
                )
            return ()
        if self.spec.reference_size is None:
            raise NoReferences(
                f"{media} has references, but this model does not edit images; remove them"
            )
        if entry.references and named:
            raise UserError(
                f"{media} has references in the metadata and in {argument('data.references')}; "
                f"remove one of the two"
            )
        folder = Path(self.config.folder if entry.references else self.config.references)
        return checked_references(
            folder,
            entry.references or named,
            self.spec.reference_size,
            allow_outside=self.config.allow_outside,
        )


def _check_single(id: str, entries: Sequence[Record], folder: Path) -> None:
    if len(entries) == 1:
        return
    if len({os.path.normpath(entry.media) for entry in entries}) == 1:
        raise UserError(
            f"{entries[0].media} is listed {len(entries)} times in {folder}; list it once, with a "
            f"list of its captions in .jsonl or .json"
        )
    names = " and ".join(entry.media for entry in entries)
    raise UserError(f"{names} in {folder} have the same name {id!r}; rename or remove all but one")


def _check_name(id: str) -> None:
    try:
        id.encode()  # ids become file names and keys in JSON
    except UnicodeEncodeError as error:
        raise UserError(f"{id!r} is not a valid UTF-8 name; rename the file") from error
    if printable(id) != id:
        raise UserError(
            f"{id!r} has line breaks or control characters in its name; rename the file"
        )


def _stop_at(config: DataConfig, problems: list[UserError]) -> None:
    """Raise the first problem that the configuration does not skip."""
    for error in problems:
        if isinstance(error, NoReferences | EnvironmentFault):
            raise error
    bad = [error for error in problems if not isinstance(error, ShortClip)]
    short = [error for error in problems if isinstance(error, ShortClip)]
    if bad and config.on_bad == "error":
        others = f"and {len(bad) - 1} more; " if len(bad) > 1 else ""
        raise UserError(
            f'{bad[0]} ({others}{argument("data.on_bad")} = "skip" skips {"them" if others else "it"})'
        ) from bad[0]
    if short and config.short_clips != "skip":
        others = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
        raise UserError(f"{short[0]}{others}") from short[0]
