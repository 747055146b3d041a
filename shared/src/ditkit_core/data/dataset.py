"""A folder of clips and captions as a checked list of samples."""

import os
import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from ditkit_core.data.buckets import Size, bucket_sizes, nearest_size
from ditkit_core.data.captions import captions_of
from ditkit_core.data.config import DataConfig
from ditkit_core.data.control_files import checked_control, controls_by_name, folders_of, text_of
from ditkit_core.data.discovery import list_entries, names_of
from ditkit_core.data.media.clip import IMAGE_SUFFIXES, VIDEO_SUFFIXES, available, kind_of, status
from ditkit_core.data.media.image_sequence import check_inside
from ditkit_core.data.records import Entry
from ditkit_core.data.references import ReferenceSize, checked_references, references_by_name
from ditkit_core.data.windows import Window, longest_that_fits, windows_of
from ditkit_core.errors import UserError, printable
from ditkit_core.io.files import inside
from ditkit_core.models.conditions import Column


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One clip to train on."""

    id: str
    """Path relative to the dataset folder, without extension, with forward slashes; `#0`, `#1`, … follow where a file has several
    windows, and the folder's name goes before where there are several folders."""
    media: Path
    captions: tuple[str, ...]
    """At least one; where there is need of one, it is the first."""
    frames: int
    """Frames to read; 1 for a still image."""
    height: int
    """Pixels that it is resized to, as `width`."""
    width: int
    references: tuple[Path, ...] = ()
    """Pictures that the caption, then an instruction, turns into this one; in order."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """What goes with the clip: by column the path of a file, or a text."""
    start_seconds: float = 0.0
    """Time of the first frame, counted from the file's first."""
    repeats: float = 1.0
    """How often it is used in an epoch, on average."""


Why = Literal["bad", "short", "unused"]
"""Why something is left out: it cannot be used (`data.on_bad`), it has too few frames (`data.short_clips`), or nothing names it."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The usable samples of a folder, and what was left out."""

    samples: list[Sample]
    """In order of id."""
    excluded: list[tuple[str, str]]
    """File (or line of the metadata) and the reason, one line each."""
    fps: float
    """Frames per second that clips are read at."""
    kinds: list[Why] = field(default_factory=list)
    """Of each that was left out, in the same order, why."""

    @property
    def captions(self) -> list[str]:
        """The first caption of each sample."""
        return [sample.captions[0] for sample in self.samples]


class ShortClip(UserError):
    """A clip that has fewer frames than asked for."""


_MOST_REASONS = 3


class NothingToTrain(UserError):
    """No entry of a dataset is usable."""

    def __init__(self, message: str, excluded: list[tuple[str, str]], kinds: list[Why]):
        """Say so, with what was left out and why as `Dataset` has it."""
        super().__init__(message)
        self.excluded, self.kinds = excluded, kinds

    @classmethod
    def after(cls, failed: Sequence[tuple[str, str]]) -> "NothingToTrain":
        """Of samples that were listed, and none of which could be encoded: (name, why) of each."""
        first = "; ".join(f"{name}: {reason}" for name, reason in failed[:_MOST_REASONS])
        more = f"; and {len(failed) - _MOST_REASONS} more" if len(failed) > _MOST_REASONS else ""
        message = (
            f"none of {len(failed)} samples can be encoded, so there is nothing to train on ({first}{more}); mend them"
        )
        return cls(message, list(failed), ["bad"] * len(failed))


class NoReferences(UserError):
    """A sample with references, for a model that takes none: another dataset is needed, not one with a sample less."""


def scan(
    config: DataConfig,
    *,
    frame_step: int,
    size_step: int,
    fps: float,
    reference_size: ReferenceSize | None = None,
    columns: Sequence[Column] = (),
    key: str = "data.folder",
) -> Dataset:
    """Check the folders of a dataset and list its samples.

    Every video is opened and its timestamps are read as far as the clip goes, so that what is wrong shows before
    anything is encoded.

    Args:
        config: The `[data]` section.
        frame_step: Clips have 1 + k * frame_step frames; 0: there are still images alone.
        size_step: Height and width are multiples of this many pixels.
        fps: The model's own frame rate, used where the configuration names none.
        reference_size: As in `ModelSpec`; None: samples have no references.
        columns: As in `ModelSpec`, of what goes with a clip.
        key: The setting that names the folder, for messages.

    Raises:
        UserError: If a setting does not fit the model, a folder cannot be used, nothing in it is usable, or an entry
            is bad and the configuration does not say to leave it out.
    """
    folders = config.folders or (config.folder,)
    for folder in folders:
        _check_folder(folder, "data.folders" if config.folders else key, config)
    _check_settings(config, frame_step=frame_step, size_step=size_step)
    names = names_of(folders)
    samples: list[Sample] = []
    left_out: list[_LeftOut] = []
    read_from: dict[str, str] = {}
    for number, folder in enumerate(folders):
        own = replace(config, folder=folder, folders=(), repeats=config.repeats[number : number + 1])
        reader = _Reader(
            config=own, frame_step=frame_step, fps=config.fps or fps, reference_size=reference_size, columns=columns,
            sizes=_sizes(config, size_step), prefix=names[number],
        )  # fmt: skip
        found, not_used = _scan_folder(reader, "data.folders" if config.folders else key)
        for sample in found:
            if (other := read_from.setdefault(os.path.abspath(sample.media), folder)) != folder:
                raise UserError(
                    f"{sample.media} is read from {other} and again from {folder}; name folders apart from each other in "
                    "data.folders, and raise a number in data.repeats where clips are to count more"
                )
        samples += found
        left_out += not_used
    return Dataset(
        samples=sorted(samples, key=lambda sample: sample.id), excluded=[each[:2] for each in left_out],
        kinds=[each.kind for each in left_out], fps=config.fps or fps,
    )  # fmt: skip


class _LeftOut(NamedTuple):
    """Something that is no sample."""

    name: str
    reason: str
    kind: Why


def _scan_folder(reader: "_Reader", key: str) -> tuple[list[Sample], list[_LeftOut]]:
    """The samples of one folder, and what was left out of it."""
    config, folder = reader.config, Path(reader.config.folder)
    beside = folders_of(config.controls, reader.columns)
    for name, place in beside.items():
        if place.resolve() == folder.resolve():
            raise UserError(f"data.controls {name} is {key} {folder} itself; put the files into a folder of their own")
    by_id: dict[str, list[Entry]] = defaultdict(list)
    for entry in list_entries(
        folder, config.metadata, allow_outside=config.allow_outside, captions=config.captions,
        skip=[*([Path(config.references)] if config.references else []), *beside.values()], columns=reader.columns,
        edits=reader.reference_size is not None, image_folders=config.image_folders,
    ):  # fmt: skip
        by_id[_identifier(folder, entry)].append(entry)
    named, left_over = references_by_name(Path(config.references), by_id) if config.references else ({}, [])
    if config.references and not named:
        there = f"none of its {len(left_over)} pictures, first {left_over[0]}," if left_over else "no picture in it"
        raise UserError(
            f"data.references {config.references}: {there} has the name of a sample; name them like the pictures of {folder}"
        )
    unused = [str(Path(config.references) / name) for name in left_over]
    controls: dict[str, dict[str, str | UserError]] = defaultdict(dict)
    for column in reader.columns:
        if column.name not in beside:
            continue
        place = beside[column.name]
        of_name, left_over = controls_by_name(place, column, by_id)
        if not of_name:
            raise UserError(
                f"data.controls {column.name}={place}: no file has the name of a sample; name them like those of {folder}"
            )
        unused += [str(place / name) for name in left_over]
        for id, file in of_name.items():
            controls[id][column.name] = file

    samples: list[Sample] = []
    problems: list[tuple[str, UserError]] = []
    for id, entries in sorted(by_id.items()):
        try:
            samples += reader.samples(id, entries, named.get(id, ()), controls[id], beside)
        except UserError as error:
            problems.append((entries[0].media, error))
    media = {sample.id: sample.media for sample in samples}
    for sample in samples:
        if media[sample.id] != sample.media:
            raise UserError(
                f"{sample.media} and {media[sample.id]} both make a sample {sample.id!r}, as windows are named; rename one of the files"
            )
    _stop_at(config, [error for _, error in problems])
    left_out = [
        _LeftOut(printable(f"{reader.prefix}{name}"), str(error), "short" if isinstance(error, ShortClip) else "bad")
        for name, error in problems
    ]
    left_out += [_LeftOut(printable(name), "no sample has this name", "unused") for name in unused]
    if not samples:
        accepted = " ".join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))
        reason = f"first of {len(problems)}: {problems[0][1]}" if problems else f"no media file; accepted: {accepted}"
        message = f"{key} {folder} has nothing to train on ({reason})"
        raise NothingToTrain(message, [each[:2] for each in left_out], [each.kind for each in left_out])
    return samples, left_out


def _check_folder(folder: str, key: str, config: DataConfig) -> None:
    if not folder:
        raise UserError(f"{key} is not set; name the folder of your clips and captions")
    found = status(Path(folder))
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{key} {folder} does not exist or is no folder; correct the path")
    if (
        config.references
        and status(Path(config.references))
        and Path(config.references).resolve() == Path(folder).resolve()
    ):
        raise UserError(f"data.references is {key} {folder} itself; put the references into a folder of their own")


def _check_settings(config: DataConfig, *, frame_step: int, size_step: int) -> None:
    for frames in config.lengths:
        what = (
            f"data.frame_buckets = {list(config.frame_buckets)}: {frames}"
            if config.frame_buckets
            else f"data.frames = {frames}"
        )
        if frame_step == 0 and frames != 1:
            raise UserError(f"data.frames = {frames}: this model knows still images alone; set 1")
        if frame_step and (frames - 1) % frame_step:
            below = 1 + (frames - 1) // frame_step * frame_step
            raise UserError(f"{what} is not 1 + k * {frame_step}; set {below} or {below + frame_step}")
    for name, pixels in (("height", config.height), ("width", config.width), ("bucket_step", config.bucket_step)):
        if (pixels < size_step or pixels % size_step) and not (name == "bucket_step" and pixels == 0):
            below = max(1, pixels // size_step) * size_step
            raise UserError(
                f"data.{name} = {pixels} is not a multiple of {size_step}; set {below} or {below + size_step}"
            )


def _sizes(config: DataConfig, size_step: int) -> tuple[Size, ...]:
    """The sizes that there are."""
    if not config.buckets:
        return ((config.height, config.width),)
    step = config.bucket_step or 4 * size_step
    return bucket_sizes(config.height, config.width, step=step, max_aspect=config.max_aspect)


def _identifier(folder: Path, entry: Entry) -> str:
    """The sample id of an entry; a broken line of metadata keeps its place as id."""
    if entry.problem is not None:
        return entry.media
    path = Path(os.path.normpath(folder / entry.media))
    for root in (os.path.normpath(folder), folder.resolve()):
        if path.is_relative_to(root):
            path = path.relative_to(root)
    if not path.name:  # the folder itself has no name
        return entry.media
    return (path.with_suffix("") if path.suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES else path).as_posix()


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Checks entries, one by one."""

    config: DataConfig
    """Of one folder."""
    frame_step: int
    fps: float
    reference_size: ReferenceSize | None
    columns: Sequence[Column]
    sizes: tuple[Size, ...]
    prefix: str
    """What ids begin with."""

    def samples(
        self,
        id: str,
        entries: list[Entry],
        named: tuple[str, ...] | UserError,
        controls: Mapping[str, str | UserError],
        beside: Mapping[str, Path],
    ) -> list[Sample]:
        """Check one entry, which is a sample for each of its windows; more than one entry means that they share a name.

        Args:
            id: Without the folder's name.
            entries: What has this id.
            named: Its references in `data.references`, or why they cannot be used.
            controls: Its files in `data.controls` by column, or why they cannot be used.
            beside: The folders of `data.controls`.
        """
        entry, folder = entries[0], Path(self.config.folder)
        if len(entries) > 1:
            if len({os.path.normpath(each.media) for each in entries}) == 1:
                raise UserError(
                    f"{entry.media} is listed {len(entries)} times in {folder}; give it one line, with a list of its captions in .jsonl or .json"
                )
            names = " and ".join(each.media for each in entries)
            raise UserError(f"{names} in {folder} have the same name {id!r}; rename or remove all but one")
        if entry.problem is not None:
            raise entry.problem
        _check_name(id)
        inside(folder, entry.media, allow_outside=self.config.allow_outside)
        # The link, not what it leads to: caches of downloaded datasets link to files without extensions.
        media = folder / entry.media
        kind = kind_of(media)
        if kind == "video" and self.frame_step == 0:
            raise UserError(
                f"{media} is a video, and this model knows still images alone; convert it to pictures or remove it"
            )
        if media.is_dir() and media.suffix.lower() not in VIDEO_SUFFIXES | IMAGE_SUFFIXES:
            self._check_image_folder(media)
        whole = self.config.windows != "first"
        # The first of three openings of a file (its content's hash and its decoding follow, in `encoding`): what is
        # wrong shows before anything slow begins.
        there = available(media, self.fps, at_most=None if whole else max(self.config.lengths))
        height, width = nearest_size(there.height, there.width, self.sizes)
        windows = [Window(0, 0, 1)] if kind == "image" else self._windows(media, id, there.frames)
        plain = Sample(
            id=f"{self.prefix}{id}", media=media, captions=captions_of(entry.captions, self.config), height=height,
            width=width, frames=1, references=self._references(media, entry, named),
            controls=self._controls(media, entry, controls, beside, windows), repeats=(*self.config.repeats, 1.0)[0],
        )  # fmt: skip
        return [
            replace(
                plain, id=f"{plain.id}#{window.number}" if len(windows) > 1 else plain.id, frames=window.frames,
                start_seconds=window.first / self.fps if window.first else 0.0,
            )
            for window in windows
        ]  # fmt: skip

    def _check_image_folder(self, media: Path) -> None:
        if not self.config.image_folders:
            raise UserError(f"{media} is a folder; set data.image_folders = true to take its images as one clip")
        check_inside(media, Path(self.config.folder), allow_outside=self.config.allow_outside)

    def _windows(self, media: Path, id: str, there: int) -> list[Window]:
        if longest_that_fits(there, self.config.lengths):
            return windows_of(there, self.config, f"{self.prefix}{id}")
        asked = min(self.config.lengths)
        frames = 1 + (there - 1) // self.frame_step * self.frame_step
        if self.config.short_clips != "shorten":
            name = "data.frame_buckets" if self.config.frame_buckets else "data.frames"
            given = f"{frames} in it" if self.config.frame_buckets else str(frames)
            raise ShortClip(
                f"{media} has {there} frames at {self.fps:g} fps, {name} asks for {asked}; "
                f'set {name} = {given}, or data.short_clips = "shorten" or "skip"'
            )
        return [Window(0, 0, frames)]

    def _controls(
        self, media: Path, entry: Entry, named: Mapping[str, str | UserError], beside: Mapping[str, Path],
        windows: Sequence[Window],
    ) -> dict[str, str]:  # fmt: skip
        """What goes with a clip, by column."""
        found = {}
        for column in self.columns:
            own, other = entry.controls.get(column.name), named.get(column.name)
            if isinstance(other, UserError):
                raise other
            if own is not None and other is not None:
                raise UserError(
                    f"{media} has {column.name} in the metadata and in data.controls; remove one or the other"
                )
            if own is None and other is None:
                if column.required:
                    raise UserError(
                        f"{media} has no {column.name}, which this model cannot be trained without; name it in the metadata, or in data.controls"
                    )
                continue
            folder = Path(self.config.folder) if other is None else beside[column.name]
            name = own if other is None else other
            assert name is not None
            if other is not None and column.kind == "text":
                inside(folder, other, allow_outside=self.config.allow_outside)
                name = text_of(folder / other)
            found[column.name] = checked_control(
                folder, name, column, allow_outside=self.config.allow_outside, fps=self.fps, windows=windows
            )
        return found

    def _references(self, media: Path, entry: Entry, named: tuple[str, ...] | UserError) -> tuple[Path, ...]:
        if isinstance(named, UserError):
            raise named
        if not (entry.references or named):
            return ()
        if self.reference_size is None:
            raise NoReferences(f"{media} has references, and this model does not edit pictures; remove them")
        if entry.references and named:
            raise UserError(f"{media} has references in the metadata and in data.references; remove one or the other")
        folder = Path(self.config.folder if entry.references else self.config.references)
        return checked_references(
            folder, entry.references or named, self.reference_size, allow_outside=self.config.allow_outside
        )


def _check_name(id: str) -> None:
    try:
        id.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{id!r} is no name in UTF-8; rename the file") from error
    if printable(id) != id:
        raise UserError(f"{id!r} has line breaks or control characters in its name; rename the file")


def _stop_at(config: DataConfig, problems: list[UserError]) -> None:
    """Raise the first problem that the configuration does not say to leave out."""
    for error in problems:
        if isinstance(error, NoReferences):
            raise error
    bad = [error for error in problems if not isinstance(error, ShortClip)]
    short = [error for error in problems if isinstance(error, ShortClip)]
    if bad and config.on_bad == "error":
        others = f"and {len(bad) - 1} more; " if len(bad) > 1 else ""
        raise UserError(f'{bad[0]} ({others}data.on_bad = "skip" leaves {"them" if others else "it"} out)') from bad[0]
    if short and config.short_clips == "error":
        others = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
        raise UserError(f"{short[0]}{others}") from short[0]
