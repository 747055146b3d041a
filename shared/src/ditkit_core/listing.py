"""Which media files a dataset folder names, and the captions of each: metadata file, or a text file beside each clip."""

import csv
import difflib
import functools
import io
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ditkit_core.conditions import Column
from ditkit_core.controls import control_headers, control_values
from ditkit_core.errors import UserError
from ditkit_core.files import inside
from ditkit_core.image_folder import numbered
from ditkit_core.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, kind_by_name, status

MEDIA_COLUMNS = ("file_name", "video", "image", "file_path", "path")
CAPTION_COLUMNS = ("text", "prompt", "caption")
REFERENCE_COLUMNS = ("references", "reference", "control", "edit_image")
METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.json")

MOST_CHARACTERS = 50_000
"""Of a caption. Text encoders read a few hundred words; what is longer is another file."""

_NO_REFERENCES = ("end_image",)
"""Nearly spelt like a column of references, and in the metadata of image-to-video models."""

_OTHER = (*CAPTION_COLUMNS, *REFERENCE_COLUMNS)

Captions = Literal["whole", "lines"]
"""Whether a text is one caption, or each of its lines is one."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a dataset: a media file and its captions, or what is wrong with the line."""

    media: str
    """Path as written, relative to the dataset folder or absolute; the line's place when it names no file."""
    captions: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    """Paths of the pictures that an instruction starts from, as written, in order."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """By column what goes with the clip: a path as written, or a text."""
    problem: UserError | None = None


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """What is the same for every line of a dataset."""

    folder: Path
    allow_outside: bool
    captions: Captions
    skip: Sequence[Path]
    """Folders inside the dataset's whose media are no samples."""
    columns: Sequence[Column]
    image_folders: bool

    def split(self, where: str, texts: Sequence[str]) -> tuple[str, ...]:
        """The captions of texts, as the configuration reads them.

        Raises:
            UserError: If nothing is left of one, or it is no text that can be written.
        """
        found = []
        for text in texts:
            lines = text.splitlines() if self.captions == "lines" else [text]
            kept = [line.strip() for line in lines if line.strip()]
            if not kept:
                raise UserError(f"{where} is empty; fill it in or remove the clip")
            if len(text) > MOST_CHARACTERS:
                raise UserError(
                    f"{where} has {len(text)} characters, no caption is so long; shorten it, or name the right file"
                )
            if "\0" in text:
                raise UserError(f"{where} has null bytes, as UTF-16 and binary files do; save it again as UTF-8")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{where} has half of a character (a lone surrogate); correct the text") from error
            found += kept
        return tuple(found)


def list_entries(
    folder: Path,
    metadata: str,
    *,
    allow_outside: bool,
    captions: Captions = "whole",
    skip: Sequence[Path] = (),
    columns: Sequence[Column] = (),
    image_folders: bool = False,
) -> list[Entry]:
    """Everything that a dataset folder names, in a fixed order; problems of single entries are part of the list.

    Args:
        folder: The dataset folder.
        metadata: A .jsonl, .csv or .json file, relative to the folder; empty: the one of `METADATA_NAMES` that is there,
            otherwise every media file with a caption of the same name beside it.
        allow_outside: Whether captions may lie outside the folder, behind links.
        captions: Whether a text is one caption, or each of its lines is one.
        skip: Folders whose media are no samples, wherever they lie.
        columns: What metadata may say of a clip beside its captions.
        image_folders: Whether a folder of numbered images is a clip.

    Raises:
        UserError: If the metadata as a whole cannot be used.
    """
    reader = _Reader(
        folder=folder, allow_outside=allow_outside, captions=captions, skip=skip, columns=columns,
        image_folders=image_folders,
    )  # fmt: skip
    found = [metadata] if metadata else [name for name in METADATA_NAMES if status(folder / name) is not None]
    if len(found) > 1:
        raise UserError(
            f"{folder} has {'both ' * (len(found) == 2)}{' and '.join(found)}; name the right one in data.metadata"
        )
    if not found:
        return list(_beside(reader))
    path = folder / found[0]
    at_path = status(path)
    if at_path is None:
        raise UserError(f"data.metadata {path} does not exist; correct the path or leave data.metadata empty")
    if not stat.S_ISREG(at_path.st_mode):
        raise UserError(f"metadata {path} is a folder or no plain file; rename it or remove it")
    readers = {".jsonl": _json_lines, ".csv": _csv_rows, ".json": _json_list}
    if path.suffix.lower() not in readers:
        raise UserError(f"data.metadata {path} is of no known kind; accepted are {', '.join(readers)}")
    entries = list(readers[path.suffix.lower()](reader, path, _text(path)))
    if not entries:
        raise UserError(f"{path} lists nothing; write a line for each clip, or remove it")
    return entries


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it again as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its permissions or remove it") from error


def _beside(reader: _Reader) -> Iterator[Entry]:
    folder = reader.folder
    lists, shots = _hint_at_lists(folder), functools.partial(_hint_at_shots, reader)
    for media in media_files(folder, skip=reader.skip, image_folders=reader.image_folders):
        named = Path(media).suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES
        caption = str(Path(media).with_suffix(".txt")) if named else f"{media}.txt"
        try:
            at_media = status(folder / media)
            if named and at_media is not None and stat.S_ISDIR(at_media.st_mode):
                raise UserError(f"{folder / media} is a folder, not a media file; rename it or remove it")
            at_caption = status(folder / caption)
            if at_caption is None or not stat.S_ISREG(at_caption.st_mode):
                raise UserError(
                    f"{folder / media} has no caption; write one to {folder / caption}{lists or shots(media)}"
                )
            text = _text(inside(folder, caption, allow_outside=reader.allow_outside))
            yield Entry(media=media, captions=reader.split(f"caption {folder / caption}", [text]))
        except UserError as error:
            yield Entry(media=media, problem=error)


def _hint_at_lists(folder: Path) -> str:
    """Where there is no caption at all, but a file that may list them under another name than is looked for: which setting names it."""
    names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []
    kinds = {Path(name).suffix for name in METADATA_NAMES}
    found = [name for name in names if Path(name).suffix.lower() in kinds]
    if not found or any(name.lower().endswith(".txt") for name in names):
        return ""
    return f", or set data.metadata = {json.dumps(found[0], ensure_ascii=False)} if that lists clips and captions"


def _hint_at_shots(reader: _Reader, media: str) -> str:
    """Where the folder of an image has a caption: that it may be a clip, or why it is none."""
    shot = Path(media).parent.as_posix()
    if Path(media).suffix.lower() not in IMAGE_SUFFIXES or not (reader.folder / f"{shot}.txt").is_file():
        return ""
    if not reader.image_folders:
        return f", or set data.image_folders = true if {shot} is one clip"
    return f", or leave nothing but images that are numbered alike in {shot}, which is no clip as it is"


def names_of(folders: Sequence[str]) -> list[str]:
    """What the ids of each folder begin with: its name, with as much of its path as tells it from the others; "" for one alone."""
    if len(folders) == 1:
        return [""]
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    return [
        next(
            "/".join(own[-count:]) + "/" for count in range(1, len(own) + 1)
            if sum(other[-count:] == own[-count:] for other in parts) == 1 or count == len(own)
        )
        for own in parts
    ]  # fmt: skip


def media_files(folder: Path, *, skip: Sequence[Path] = (), image_folders: bool = False) -> Iterator[str]:
    """Relative paths of media files, and of folders called like one; hidden ones are ignored, links followed once.

    Args:
        folder: Where to look, subfolders included.
        skip: Folders that are not looked into.
        image_folders: Whether a subfolder of numbered images alone is named in place of its images.
    """
    visited = {os.path.realpath(each) for each in skip}
    for place, folders, names in os.walk(folder, onerror=_cannot_list, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        if image_folders and Path(place) != Path(folder) and not folders and numbered(names):
            yield Path(place).relative_to(folder).as_posix()
            continue
        for name in sorted(folders + names):
            if _called_like_media(name):
                yield Path(place, name).relative_to(folder).as_posix()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not _called_like_media(name))


def _called_like_media(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in VIDEO_SUFFIXES | IMAGE_SUFFIXES


def _cannot_list(error: OSError) -> None:
    raise UserError(
        f"folder {error.filename} cannot be read ({error.strerror}); correct its permissions or remove it"
    ) from error


def _json_lines(reader: _Reader, path: Path, text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line, object_pairs_hook=functools.partial(_object, where))
            if not isinstance(row, dict):
                raise UserError(f'{where} is no JSON object; write {{"file_name": "clip.mp4", "text": "caption"}}')
            yield _row(reader, where, row, _json_paths)
        except json.JSONDecodeError as error:
            reason = f"{error.msg}, column {error.colno}"
            yield Entry(media=where, problem=UserError(f"{where} is not valid JSON ({reason}); correct the line"))
        except RecursionError:
            yield Entry(media=where, problem=UserError(f"{where} is nested too deeply; correct the line"))
        except ValueError:  # Python's limit on the digits of an integer
            yield Entry(media=where, problem=UserError(f"{where} has a number of too many digits; correct the line"))
        except UserError as error:
            yield Entry(media=where, problem=error)


def _json_list(reader: _Reader, path: Path, text: str) -> Iterator[Entry]:
    try:
        rows = json.loads(text, object_pairs_hook=functools.partial(_object, str(path)))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} line {error.lineno} is not valid JSON ({error.msg}); correct the file") from error
    except (RecursionError, ValueError) as error:  # ValueError: Python's limit on the digits of an integer
        raise UserError(f"{path} is nested too deeply, or has a number of too many digits; correct the file") from error
    if not isinstance(rows, list):
        raise UserError(f'{path} is no JSON list; write [{{"file_path": "clip.mp4", "text": "caption"}}, …]')
    for number, row in enumerate(rows, start=1):
        where = f"{path} entry {number}"
        try:
            if not isinstance(row, dict):
                raise UserError(f'{where} is no JSON object; write {{"file_path": "clip.mp4", "text": "caption"}}')
            yield _row(reader, where, row, _json_paths)
        except UserError as error:
            yield Entry(media=where, problem=error)


def _object(where: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise UserError(f"{where} has {twice!r} twice; remove one")
    return found


def _csv_rows(reader: _Reader, path: Path, text: str) -> Iterator[Entry]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    try:
        where = f"{path} line 1"
        names = rows.fieldnames or []
        controls = control_headers(where, names, reader.columns, media=MEDIA_COLUMNS, other=_OTHER)
        plain = [name for name in names if name not in controls.values()]
        _only_column(where, plain, MEDIA_COLUMNS, "media")
        _only_column(where, plain, CAPTION_COLUMNS, "caption")
        _reference_column(where, plain)
        for row in rows:
            where = f"{path} line {rows.line_num}"
            try:
                if None in row:
                    raise UserError(
                        f"{where} has more fields than the header; put captions with commas in double quotes"
                    )
                yield _row(reader, where, row, _csv_paths)
            except UserError as error:
                yield Entry(media=where, problem=error)
    except csv.Error as error:
        raise UserError(f"{path} line {rows.line_num} is not valid CSV ({error}); correct the file") from error


def _row(
    reader: _Reader, where: str, row: Mapping[str, object], paths: Callable[[str, object], tuple[str, ...]]
) -> Entry:
    """The entry of one row of metadata; `paths` reads its reference column."""
    headers = control_headers(where, row, reader.columns, media=MEDIA_COLUMNS, other=_OTHER)
    plain = {name: value for name, value in row.items() if name not in headers.values()}
    column = _only_column(where, plain, MEDIA_COLUMNS, "media")
    (media,) = _texts(f"{where}: {column!r}", [row[column]])
    column = _only_column(where, plain, CAPTION_COLUMNS, "caption")
    given = row[column]
    named = f"{where}: {column!r}"
    captions = reader.split(named, _texts(named, given if isinstance(given, list) else [given]))
    references: tuple[str, ...] = ()
    if found := _reference_column(where, plain):
        references = paths(f"{where}: {found!r}", row[found])
    controls = control_values(where, row, reader.columns, headers)
    try:
        for path in (media, *references):
            there = status(reader.folder / path)
            is_folder = there is not None and stat.S_ISDIR(there.st_mode)
            if not (is_folder and reader.image_folders):
                kind_by_name(Path(path))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return Entry(media=media, captions=captions, references=references, controls=controls)


def _json_paths(where: str, given: object) -> tuple[str, ...]:
    """One path, a list of them, or null for none."""
    if given is None or given == []:
        return ()
    return _texts(where, given if isinstance(given, list) else [given])


def _csv_paths(where: str, given: object) -> tuple[str, ...]:
    """One path, several as a JSON list, or nothing."""
    if not isinstance(given, str) or not given.strip():
        return ()
    if not given.lstrip().startswith("["):
        return _texts(where, [given])
    try:
        return _json_paths(where, json.loads(given))
    except ValueError as error:
        raise UserError(f'{where} is no JSON list; write one path, or ["first.png", "second.png"]') from error


def _texts(where: str, values: Sequence[object]) -> tuple[str, ...]:
    """Values that are texts with something in them, at least one."""
    texts = tuple(value.strip() for value in values if isinstance(value, str) and value.strip())
    if not texts or len(texts) < len(values):
        raise UserError(f"{where} is empty or no text; fill it in or remove the line")
    return texts


def _column(where: str, found: Iterable[str], accepted: tuple[str, ...], what: str) -> str:
    """The first of the accepted columns that is there."""
    for name in accepted:
        if name in found:
            return name
    names = list(found)
    remedy = f"accepted: {', '.join(accepted)}"
    if len(names) == 1 and (apart := next((each for each in (";", "\t", "|") if each in names[0]), "")):
        remedy = f"fields are separated by commas and not by {apart!r}: save it again with commas"
    elif near := next((name for name in names if name.strip().lower() in accepted), ""):
        remedy = f"write {near!r} as {near.strip().lower()!r}"
    raise UserError(f"{where} has no {what} column: found {', '.join(names) or 'none'}; {remedy}")


def _reference_column(where: str, found: Iterable[str]) -> str:
    """The reference column that is there, if any; a misspelt one is refused, because without it nothing would be edited."""
    if any(name in REFERENCE_COLUMNS for name in found):
        return _only_column(where, found, REFERENCE_COLUMNS, "reference")
    for name in found:
        if name in _NO_REFERENCES:
            continue
        if close := difflib.get_close_matches(name.lower(), REFERENCE_COLUMNS, n=1, cutoff=0.8):
            raise UserError(
                f"{where} has a column {name!r}; call it {close[0]!r} if it names references, or else rename it"
            )
    return ""


def _only_column(where: str, found: Iterable[str], accepted: tuple[str, ...], what: str) -> str:
    """The accepted column that is there, which must be the only one."""
    there = [name for name in found if name in accepted]
    if len(there) > 1:
        raise UserError(f"{where} has {len(there)} {what} columns, {', '.join(there)}; remove or rename all but one")
    return _column(where, there or found, accepted, what)
