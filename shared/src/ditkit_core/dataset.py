"""A folder of clips and captions as a checked list of samples."""

import os
import stat
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ditkit_core.errors import UserError
from ditkit_core.files import inside
from ditkit_core.listing import Entry, list_entries
from ditkit_core.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, available_frames, kind_of, status
from ditkit_core.settings import setting


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The `[data]` section: which clips and captions, and how clips are cut."""

    folder: str = setting("", resume="refused")
    """Folder of videos, images and captions."""
    metadata: str = setting("", resume="refused")
    """A .jsonl or .csv file that lists media and captions, relative to the folder. Empty: metadata.jsonl or
    metadata.csv where the folder has one, otherwise a .txt file with the caption beside each media file."""
    frames: int = setting(81, resume="refused")
    """Frames of a clip, 1 + a multiple of the model's frame step; still images are always one frame."""
    fps: float = setting(0.0, resume="refused")
    """Frames per second that clips are resampled to, by timestamp; 0 means the model's own rate."""
    height: int = setting(480, resume="refused")
    """Height of a clip in pixels: resized to cover, cropped to the centre."""
    width: int = setting(832, resume="refused")
    """Width of a clip in pixels."""
    allow_outside: bool = setting(False, resume="free")
    """Allow paths and links that lead out of the folder."""
    on_bad: Literal["error", "skip"] = setting("error", resume="refused")
    """What to do with unusable files and captions: stop, or leave them out and say so."""
    short_clips: Literal["error", "skip", "shorten"] = setting("error", resume="refused")
    """What to do with clips that have too few frames: stop, leave them out, or use as many frames as fit."""

    def __post_init__(self) -> None:
        bounds = {"frames": (1, 65536), "fps": (0, 1000), "height": (1, 16384), "width": (1, 16384)}
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
    caption: str
    frames: int
    """Frames to read; 1 for a still image."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The usable samples of a folder, and what was left out."""

    samples: list[Sample]
    """In order of id."""
    excluded: list[tuple[str, str]]
    """File (or line of the metadata) and the reason, one line each."""
    fps: float
    """Frames per second that clips are read at."""


class ShortClip(UserError):
    """A clip that has fewer frames than asked for."""


def scan(config: DataConfig, *, frame_step: int, size_step: int, fps: float) -> Dataset:
    """Check a dataset folder and list its samples.

    Every video is opened and its timestamps are read as far as the clip goes, so that what is wrong shows before
    anything is encoded.

    Args:
        config: The `[data]` section.
        frame_step: Clips have 1 + k * frame_step frames.
        size_step: Height and width are multiples of this many pixels.
        fps: The model's own frame rate, used where the configuration names none.

    Raises:
        UserError: If a setting does not fit the model, the folder cannot be used, nothing in it is usable, or an entry
            is bad and the configuration does not say to leave it out.
    """
    _check_settings(config, frame_step=frame_step, size_step=size_step)
    folder = Path(config.folder)
    fps = config.fps or fps
    by_id: dict[str, list[Entry]] = defaultdict(list)
    for entry in list_entries(folder, config.metadata, allow_outside=config.allow_outside):
        by_id[_identifier(folder, entry)].append(entry)

    samples: list[Sample] = []
    problems: list[tuple[str, UserError]] = []
    for id, entries in sorted(by_id.items()):
        try:
            samples.append(_sample(config, id, entries, frame_step=frame_step, fps=fps))
        except UserError as error:
            problems.append((entries[0].media, error))
    _stop_at(config, [error for _, error in problems])
    if not samples:
        accepted = " ".join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))
        reason = f"first of {len(problems)}: {problems[0][1]}" if problems else f"no media file; accepted: {accepted}"
        raise UserError(f"data.folder {folder} has nothing to train on ({reason})")
    return Dataset(samples=samples, excluded=[(name, str(error)) for name, error in problems], fps=fps)


def _check_settings(config: DataConfig, *, frame_step: int, size_step: int) -> None:
    if not config.folder:
        raise UserError("data.folder is not set; name the folder of your clips and captions")
    found = status(Path(config.folder))
    if found is None or not stat.S_ISDIR(found.st_mode):
        raise UserError(f"data.folder {config.folder} does not exist or is no folder; correct the path")
    if (config.frames - 1) % frame_step:
        below = 1 + (config.frames - 1) // frame_step * frame_step
        raise UserError(
            f"data.frames = {config.frames} is not 1 + k * {frame_step}; set {below} or {below + frame_step}"
        )
    for name, pixels in (("height", config.height), ("width", config.width)):
        if pixels < size_step or pixels % size_step:
            below = max(1, pixels // size_step) * size_step
            raise UserError(
                f"data.{name} = {pixels} is not a multiple of {size_step}; set {below} or {below + size_step}"
            )


def _identifier(folder: Path, entry: Entry) -> str:
    """The sample id of an entry; a broken line of metadata keeps its place as id."""
    if entry.problem is not None:
        return entry.media
    path = Path(os.path.normpath(folder / entry.media))
    for root in (os.path.normpath(folder), folder.resolve()):
        if path.is_relative_to(root):
            path = path.relative_to(root)
    return path.with_suffix("").as_posix() if path.name else entry.media  # the folder itself has no name


def _sample(config: DataConfig, id: str, entries: list[Entry], *, frame_step: int, fps: float) -> Sample:
    """Check one entry; more than one means that they share a name."""
    entry = entries[0]
    if len(entries) > 1:
        names = " and ".join(entry.media for entry in entries)
        raise UserError(f"{names} in {config.folder} have the same name {id!r}; rename or remove all but one")
    if entry.problem is not None:
        raise entry.problem
    inside(Path(config.folder), entry.media, allow_outside=config.allow_outside)
    # The link, not what it leads to: caches of downloaded datasets link to files without extensions.
    media = Path(config.folder) / entry.media
    available = available_frames(media, fps, at_most=config.frames)
    frames = 1 if kind_of(media) == "image" else config.frames
    if available < frames:
        frames = 1 + (available - 1) // frame_step * frame_step
        if config.short_clips != "shorten":
            raise ShortClip(
                f"{media} has {available} frames at {fps:g} fps, data.frames asks for {config.frames}; "
                f'set data.frames = {frames}, or data.short_clips = "shorten" or "skip"'
            )
    return Sample(id=id, media=media, caption=entry.caption, frames=frames)


def _stop_at(config: DataConfig, problems: list[UserError]) -> None:
    """Raise the first problem that the configuration does not say to leave out."""
    bad = [error for error in problems if not isinstance(error, ShortClip)]
    short = [error for error in problems if isinstance(error, ShortClip)]
    if bad and config.on_bad == "error":
        others = f"and {len(bad) - 1} more; " if len(bad) > 1 else ""
        raise UserError(f'{bad[0]} ({others}data.on_bad = "skip" leaves {"them" if others else "it"} out)') from bad[0]
    if short and config.short_clips == "error":
        others = f" (and {len(short) - 1} more)" if len(short) > 1 else ""
        raise UserError(f"{short[0]}{others}") from short[0]
