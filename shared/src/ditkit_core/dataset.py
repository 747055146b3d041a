"""A folder of clips and captions as a checked list of samples."""

import os
import stat
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ditkit_core.buckets import Size, bucket_sizes, nearest_size
from ditkit_core.errors import UserError
from ditkit_core.files import inside
from ditkit_core.listing import Entry, list_entries
from ditkit_core.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, available, kind_of, status
from ditkit_core.references import ReferenceSize, checked_references, references_by_name
from ditkit_core.settings import setting


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `[data]` section: which clips and captions, and how clips are cut."""

    folder: str = setting("", resume="refused")
    """Folder of videos, images and captions."""
    metadata: str = setting("", resume="refused")
    """A .jsonl or .csv file that lists media and captions, relative to the folder. Empty: metadata.jsonl or
    metadata.csv where the folder has one, otherwise a .txt file with the caption beside each media file."""
    frames: int = setting(0, resume="refused")
    """Frames of a clip, 1 + a multiple of the model's frame step; still images are always one frame. 0 means the model's own."""
    fps: float = setting(0.0, resume="refused")
    """Frames per second that clips are resampled to, by timestamp; 0 means the model's own rate."""
    height: int = setting(0, resume="refused")
    """Height of a clip in pixels: resized to cover, cropped to the centre. 0 means the model's own."""
    width: int = setting(0, resume="refused")
    """Width of a clip in pixels. 0 means the model's own."""
    buckets: bool = setting(False, resume="refused")
    """Give each picture or clip the size nearest to its own aspect ratio, of about height × width pixels, instead of cropping all
    to one."""
    bucket_step: int = setting(0, resume="refused")
    """Pixels that the sides of buckets are multiples of; itself a multiple of the model's size step. 0 means four such steps."""
    max_aspect: float = setting(2.0, resume="refused")
    """Largest ratio of a bucket's longer side to the shorter, at least 1; what is longer is cropped."""
    captions: Literal["whole", "lines"] = setting("whole", resume="refused")
    """Whether a text is one caption, or each of its lines that is not empty. Of several one is picked at each use; a list in
    metadata.jsonl is several anyway."""
    references: str = setting("", resume="refused")
    """Folder of pictures to edit: for `cat.png` of the dataset, `cat.png` here, or `cat_0.png`, `cat_1.png`, … Metadata may name
    them instead, in a column `references`."""
    allow_outside: bool = setting(False, resume="free")
    """Allow paths and links that lead out of the folder."""
    on_bad: Literal["error", "skip"] = setting("error", resume="refused")
    """What to do with unusable files and captions: stop, or leave them out and say so."""
    short_clips: Literal["error", "skip", "shorten"] = setting("error", resume="refused")
    """What to do with clips that have too few frames: stop, leave them out, or use as many frames as fit."""

    def __post_init__(self) -> None:
        bounds = {"frames": (0, 65536), "fps": (0, 1000), "height": (0, 16384), "width": (0, 16384)}
        bounds |= {"bucket_step": (0, 4096), "max_aspect": (1, 16)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                nearest = most if value > most else least
                raise UserError(f"data.{name} = {value} is not between {least} and {most}; set {nearest}")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One clip to train on."""

    id: str
    """Path relative to the dataset folder, without extension, with forward slashes."""
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


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The usable samples of a folder, and what was left out."""

    samples: list[Sample]
    """In order of id."""
    excluded: list[tuple[str, str]]
    """File (or line of the metadata) and the reason, one line each."""
    fps: float
    """Frames per second that clips are read at."""

    @property
    def captions(self) -> list[str]:
        """The first caption of each sample."""
        return [sample.captions[0] for sample in self.samples]


class ShortClip(UserError):
    """A clip that has fewer frames than asked for."""


class NoReferences(UserError):
    """A sample with references, for a model that takes none: another dataset is needed, not one with a sample less."""


def scan(
    config: DataConfig,
    *,
    frame_step: int,
    size_step: int,
    fps: float,
    reference_size: ReferenceSize | None = None,
    key: str = "data.folder",
) -> Dataset:
    """Check a dataset folder and list its samples.

    Every video is opened and its timestamps are read as far as the clip goes, so that what is wrong shows before
    anything is encoded.

    Args:
        config: The `[data]` section.
        frame_step: Clips have 1 + k * frame_step frames; 0: there are still images alone.
        size_step: Height and width are multiples of this many pixels.
        fps: The model's own frame rate, used where the configuration names none.
        reference_size: As in `ModelSpec`; None: samples have no references.
        key: The setting that names the folder, for messages.

    Raises:
        UserError: If a setting does not fit the model, the folder cannot be used, nothing in it is usable, or an entry
            is bad and the configuration does not say to leave it out.
    """
    _check_settings(config, key, frame_step=frame_step, size_step=size_step)
    folder = Path(config.folder)
    reader = _Reader(
        config=config, frame_step=frame_step, fps=config.fps or fps, reference_size=reference_size,
        sizes=_sizes(config, size_step),
    )  # fmt: skip
    by_id: dict[str, list[Entry]] = defaultdict(list)
    for entry in list_entries(
        folder, config.metadata, allow_outside=config.allow_outside, captions=config.captions,
        skip=Path(config.references) if config.references else None,
    ):  # fmt: skip
        by_id[_identifier(folder, entry)].append(entry)
    named, left_over = references_by_name(Path(config.references), by_id) if config.references else ({}, [])
    if config.references and not named:
        there = f"none of its {len(left_over)} pictures, first {left_over[0]}," if left_over else "no picture in it"
        raise UserError(
            f"data.references {config.references}: {there} has the name of a sample; name them like the pictures of {folder}"
        )

    samples: list[Sample] = []
    problems: list[tuple[str, UserError]] = []
    for id, entries in sorted(by_id.items()):
        try:
            samples.append(reader.sample(id, entries, named.get(id, ())))
        except UserError as error:
            problems.append((entries[0].media, error))
    _stop_at(config, [error for _, error in problems])
    if not samples:
        accepted = " ".join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))
        reason = f"first of {len(problems)}: {problems[0][1]}" if problems else f"no media file; accepted: {accepted}"
        raise UserError(f"{key} {folder} has nothing to train on ({reason})")
    excluded = [(name, str(error)) for name, error in problems]
    excluded += [(str(Path(config.references) / name), "no sample has this name") for name in left_over]
    return Dataset(samples=samples, excluded=excluded, fps=reader.fps)


def _check_settings(config: DataConfig, key: str, *, frame_step: int, size_step: int) -> None:
    if not config.folder:
        raise UserError(f"{key} is not set; name the folder of your clips and captions")
    found = status(Path(config.folder))
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"{key} {config.folder} does not exist or is no folder; correct the path")
    if config.references and Path(config.references).resolve() == Path(config.folder).resolve():
        raise UserError(
            f"data.references is {key} {config.folder} itself; put the references into a folder of their own"
        )
    if frame_step == 0 and config.frames != 1:
        raise UserError(f"data.frames = {config.frames}: this model knows still images alone; set 1")
    if frame_step and (config.frames - 1) % frame_step:
        below = 1 + (config.frames - 1) // frame_step * frame_step
        raise UserError(
            f"data.frames = {config.frames} is not 1 + k * {frame_step}; set {below} or {below + frame_step}"
        )
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
    return path.with_suffix("").as_posix() if path.name else entry.media  # the folder itself has no name


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Checks entries, one by one."""

    config: DataConfig
    frame_step: int
    fps: float
    reference_size: ReferenceSize | None
    sizes: tuple[Size, ...]

    def sample(self, id: str, entries: list[Entry], named: tuple[str, ...] | UserError) -> Sample:
        """Check one entry; more than one means that they share a name.

        Args:
            id: The sample's.
            entries: What has this id.
            named: Its references in `data.references`, or why they cannot be used.
        """
        entry, folder = entries[0], Path(self.config.folder)
        if len(entries) > 1:
            names = " and ".join(entry.media for entry in entries)
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
        there = available(media, self.fps, at_most=self.config.frames)
        height, width = nearest_size(there.height, there.width, self.sizes)
        return Sample(
            id=id, media=media, captions=entry.captions, height=height, width=width,
            frames=1 if kind == "image" else self._frames(media, there.frames),
            references=self._references(media, entry, named),
        )  # fmt: skip

    def _frames(self, media: Path, there: int) -> int:
        if there >= self.config.frames:
            return self.config.frames
        frames = 1 + (there - 1) // self.frame_step * self.frame_step
        if self.config.short_clips != "shorten":
            raise ShortClip(
                f"{media} has {there} frames at {self.fps:g} fps, data.frames asks for {self.config.frames}; "
                f'set data.frames = {frames}, or data.short_clips = "shorten" or "skip"'
            )
        return frames

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
