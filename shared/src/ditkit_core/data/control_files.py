"""Condition files of a clip besides its caption: control videos, masks, images, music, texts.
Finding them by column or folder, and checking them."""

import difflib
import json
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ditkit_core.config.nearest import path_remedy
from ditkit_core.data.columns import NUMBERED_REFERENCES, number_of
from ditkit_core.data.masks import MASK
from ditkit_core.data.media.clip import IMAGE_SUFFIXES, VIDEO_SUFFIXES, available, media_kind
from ditkit_core.data.media.files import MOST_LIST_BYTES, is_folder, read_dataset_text, status, walk
from ditkit_core.data.media.image_sequence import check_inside
from ditkit_core.data.side_names import Names
from ditkit_core.data.windows import Window
from ditkit_core.errors import UserError
from ditkit_core.io.files import inside, refuse_backslashes
from ditkit_core.models.conditions import Column, named_columns

AUDIO_SUFFIXES = frozenset({".wav", ".mp3", ".flac", ".m4a", ".aac", ".ogg", ".opus"})
FEATURE_SUFFIXES = frozenset({".npy", ".safetensors"})
"""Precomputed audio features."""

_SUFFIXES = {
    "image": IMAGE_SUFFIXES,
    "video": VIDEO_SUFFIXES | IMAGE_SUFFIXES,
    "audio": AUDIO_SUFFIXES | VIDEO_SUFFIXES | FEATURE_SUFFIXES,
    "text": frozenset({".txt"}),
}


def control_headers(
    where: str,
    headers: Iterable[str],
    columns: Sequence[Column],
    *,
    media: Collection[str] = (),
    other: Collection[str] = (),
) -> dict[str, list[str]]:
    """Map metadata headers to the model's columns; a header may stand for one column or for a list
    that fills several.

    A misspelt header is refused: ignoring it would train without the condition, and nothing would
    show it. The columns of a list include those that have a header of their own, which takes
    precedence.

    Args:
        media: Headers that name the clip itself, unless another of them is present as well (`image`
            next to `video`).
        other: Headers that are allowed even though they are not columns of the model.
    """
    names = {
        name: [column.name for column in targets]
        for name, targets in named_columns(columns).items()
    }
    headers = [header for header in headers if isinstance(header, str)]
    columns_by_header: dict[str, list[str]] = {}
    for header in headers:
        if header in media and (
            header not in names
            or all(media_header in names for media_header in headers if media_header in media)
        ):
            continue
        if targets := names.get(header) or _first_of_several(where, header, names):
            same_kind = [
                earlier
                for earlier, earlier_targets in columns_by_header.items()
                if (len(earlier_targets) > 1) == (len(targets) > 1)
            ]
            if duplicate := next(
                (
                    earlier
                    for earlier in same_kind
                    if set(columns_by_header[earlier]) & set(targets)
                ),
                "",
            ):
                raise UserError(
                    f"{where} has {duplicate!r} and {header!r}, which mean the same; remove one of "
                    f"the two columns"
                )
            columns_by_header[header] = targets
        elif header not in other and (
            suggestions := difflib.get_close_matches(header.lower(), names, n=1, cutoff=0.85)
        ):
            raise UserError(
                f"{where} has a column {header!r}; did you mean {suggestions[0]!r}? Rename it if "
                f"not"
            )
    return columns_by_header


def _first_of_several(where: str, header: str, names: Mapping[str, list[str]]) -> list[str]:
    """The column of `control_path_0` if the model takes a single file as `control_path`; empty for
    any other header."""
    if NUMBERED_REFERENCES not in names or (number := number_of(header)) is None:
        return []
    targets = names[NUMBERED_REFERENCES]
    if number:
        raise UserError(
            f"{where} has a column {header!r}, but this model takes a single file; rename it to "
            f"{targets[0]!r}, or remove it"
        )
    return targets


def control_values(
    where: str,
    row: Mapping[str, object],
    columns: Sequence[Column],
    headers: Mapping[str, list[str]],
) -> dict[str, str]:
    """The paths or texts of one row by column, as written, in the order of `columns`; empty fields
    are omitted.

    A list fills the columns that have no value of their own, in order.
    """
    kinds = {column.name: column.kind for column in columns}
    column_values: dict[str, str] = {}
    # Headers of one column first: a list fills only the columns that none of them has filled.
    for header, targets in sorted(
        headers.items(), key=lambda header_columns: len(header_columns[1])
    ):
        value = row.get(header)
        free_names = [name for name in targets if name not in column_values]
        values = [value] if len(targets) == 1 or not isinstance(value, list) else value
        if not all(map(_is_empty, values[len(free_names) :])):
            filled_names = [name for name in targets if name not in free_names]
            count_text = (
                f"{len(free_names)} besides {', '.join(filled_names)}"
                if filled_names
                else f"{len(free_names)}"
            )
            raise UserError(
                f"{where}: {header!r} names {len(values)} files, but this model takes "
                f"{count_text}; remove {len(values) - len(free_names)}"
            )
        for name, item in zip(free_names, values, strict=False):
            if not _is_empty(item):
                column_values[name] = _written(f"{where}: {header!r}", item, kinds[name])
    return {
        column.name: column_values[column.name]
        for column in columns
        if column.name in column_values
    }


def _is_empty(value: object) -> bool:
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def _written(where: str, value: object, kind: str) -> str:
    """The path or text in a field."""
    # Texts such as camera paths are numbers in JSON; they are kept as text, because a sample's
    # controls are strings.
    if kind == "text" and (
        _is_number(value) or (isinstance(value, list) and all(map(_is_number, value)))
    ):
        value = json.dumps(value)
    elif isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise UserError(
            f"{where} is not {'a text' if kind == 'text' else 'the path of a single file'}; "
            f"correct it or leave it empty"
        )
    return value.strip()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def control_folders(
    settings: Sequence[str], columns: Sequence[Column], masks: str = ""
) -> dict[str, Path]:
    """The folders in `data.controls` and `data.masks`, by column."""
    names = {name: targets[0].name for name, targets in named_columns(columns).items()}
    folder_by_column: dict[str, Path] = {}
    for item in settings:
        name, equals, folder = item.partition("=")
        if not (equals and name.strip() and folder.strip()):
            raise UserError(
                f"data.controls has {item!r}, which is not column=folder; write it like "
                f"vace_video=masks"
            )
        if name.strip() == MASK.name:
            raise UserError(
                f"data.controls has {item!r}; set data.masks to the folder of loss masks"
            )
        if not columns:
            raise UserError(
                f"data.controls has {item!r}, but this model takes no conditions from files; "
                f"remove it"
            )
        if name.strip() not in names:
            near = difflib.get_close_matches(name.strip().lower(), names, n=1, cutoff=0.5)
            remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(names)}"
            raise UserError(
                f"data.controls has {name.strip()!r}, which is not a column of this model; {remedy}"
            )
        column = names[name.strip()]
        if column in folder_by_column:
            raise UserError(f"data.controls names {column} twice; remove one")
        if not is_folder(Path(folder.strip())):
            raise UserError(
                f"data.controls {item!r}: the path does not exist or is not a folder; "
                f"{path_remedy(folder.strip())}"
            )
        folder_by_column[column] = Path(folder.strip())
    if masks:
        if not is_folder(Path(masks)):
            raise UserError(
                f"data.masks {masks} does not exist or is not a folder; {path_remedy(masks)}"
            )
        folder_by_column[MASK.name] = Path(masks)
    return folder_by_column


class Control(NamedTuple):
    """The file that `data.controls` provides for one column of a clip."""

    folder: Path
    name: str | UserError
    """Path relative to the folder, or the reason why the file cannot be used."""


def controls_by_name(
    folders: Mapping[str, Path], columns: Sequence[Column], ids: Collection[str], dataset: Path
) -> tuple[Mapping[str, Mapping[str, Control]], list[str]]:
    """The files of the `data.controls` folders that have the name of a sample, by its id and
    column, and the files that match none.

    A clip in a subfolder of the dataset has its file in the same subfolder there.
    """
    controls: dict[str, dict[str, Control]] = defaultdict(dict)
    left_over: list[str] = []
    samples = Names(ids)
    for column in columns:
        if column.name not in folders:
            continue
        folder, files_by_id = folders[column.name], defaultdict[str, list[str]](list)
        setting = (
            f"data.masks {folder}" if column is MASK else f"data.controls {column.name}={folder}"
        )
        for name in _files(folder, samples):
            path, is_folder = Path(name), (folder / name).is_dir()
            accepted = _SUFFIXES.get(column.kind)
            if accepted is not None and path.suffix.lower() not in accepted and not is_folder:
                continue
            id = (path if is_folder else path.with_suffix("")).as_posix()
            files_by_id[samples.find(id) or id].append(name)
        if not files_by_id.keys() & set(ids):
            raise UserError(
                f"{setting}: no file has the name of a sample; name the files like those in "
                f"{dataset}"
            )
        for id, names in files_by_id.items():
            if id in ids:
                several = f"{' and '.join(names)} in {folder} both match {id!r} as its {column.name}; remove all but one"
                controls[id][column.name] = Control(
                    folder, names[0] if len(names) == 1 else UserError(several)
                )
            else:
                left_over += [str(folder / name) for name in names]
    return controls, left_over


def _files(folder: Path, ids: Names) -> Iterator[str]:
    """Relative paths of files, and of folders that have the name of a clip."""
    for directory, folders, names in walk(folder):
        subfolder = directory.relative_to(folder)
        clips = [name for name in folders if ids.find((subfolder / name).as_posix()) is not None]
        yield from ((subfolder / name).as_posix() for name in clips + names)
        folders[:] = [name for name in folders if name not in clips]


def checked_control(
    folder: Path,
    name: str,
    column: Column,
    *,
    allow_outside: bool,
    fps: float,
    windows: Sequence[Window],
) -> str:
    """The path of a condition that exists, has the right kind and is long enough; for a text column
    the text itself.

    `windows` belong to the clip's file: a control video must reach to the end of the last one.
    """
    if column.kind == "text":
        return name
    path, label = folder / name, f"{column.name} {folder / name}"
    frames = max(window.first + window.frames for window in windows)
    try:
        at = status(path)  # raises for a name that no file can have
        if at is None:
            # a clearer message than "does not exist" for paths written on Windows
            refuse_backslashes(name)
    except UserError as error:
        raise error.at(column.name) from error
    inside(folder, name, allow_outside=allow_outside)
    if at is None:
        raise UserError(f"{label} does not exist; {path_remedy(path)}")
    if stat.S_ISREG(at.st_mode) and at.st_size == 0:
        raise UserError(f"{label} is empty (0 bytes); copy it again")
    accepted = _SUFFIXES.get(column.kind)
    if (
        accepted is not None
        and path.suffix.lower() not in accepted
        and not (column.kind == "video" and path.is_dir())
    ):
        raise UserError(
            f"{label} is not of kind {column.kind} by its extension; accepted: "
            f"{' '.join(sorted(accepted))}"
        )
    if column.kind in ("image", "video"):
        try:
            if media_kind(path) == "video" and path.is_dir():
                check_inside(path, folder, allow_outside=allow_outside)
            still = media_kind(path) == "image"
            control_frames = available(path, fps, at_most=frames).frames
        except UserError as error:
            raise error.at(column.name) from error
        if not still and control_frames < frames:
            raise UserError(
                f"{label} has {control_frames} frames at {fps:g} fps, but its clip needs {frames}; "
                f"make it as long as the clip"
            )
        # The column describes one moment of the file (its start, say), so it is wrong for windows
        # that begin later.
        if column.moment and any(window.first for window in windows):
            clips = f"{len(windows)} clips" if len(windows) > 1 else "a clip"
            raise UserError(
                f"{label} shows how one clip {column.moment}s, but data.windows takes {clips} from "
                f"its file, not only from the start; "
                'set data.windows = "first", split the file into clips, or leave the column empty for it'
            )
    elif not stat.S_ISREG(at.st_mode):
        raise UserError(f"{label} is a folder, not a file; correct the path")
    elif at.st_size > MOST_LIST_BYTES and path.suffix.lower() not in VIDEO_SUFFIXES:
        raise UserError(
            f"{label} has {at.st_size} bytes, more than the {MOST_LIST_BYTES} that are read; "
            f"shorten it"
        )
    return str(path)


def text_of(folder: Path, name: str, *, allow_outside: bool) -> str:
    """Read the file of a text column."""
    text = read_dataset_text(folder, name, allow_outside=allow_outside).strip()
    if not text:
        raise UserError(f"{folder / name} is empty; fill it in or remove it")
    return text
