"""What each line of a dataset says: its clip, captions, references and conditions, read from JSON lines, a JSON list or CSV."""

import csv
import functools
import io
import json
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ditkit_core.data.columns import (
    CAPTION_COLUMNS,
    MEDIA_COLUMNS,
    OF_THE_MODEL,
    REFERENCE_COLUMNS,
    media_columns,
    only_column,
    reference_columns,
)
from ditkit_core.data.control_files import control_headers, control_values
from ditkit_core.data.media.clip import kind_by_name, status
from ditkit_core.errors import UserError
from ditkit_core.io.files import refuse_backslashes
from ditkit_core.models.conditions import Column

MOST_CHARACTERS = 50_000
"""Of a caption. Text encoders read a few hundred words; what is longer is another file."""

_LIST = re.compile(r"\s*\[\s*[\]\"']")
"""How a list of paths begins, of JSON or (to be told) of Python."""

_OTHER = (*MEDIA_COLUMNS, *CAPTION_COLUMNS, *REFERENCE_COLUMNS, *OF_THE_MODEL)

CaptionMode = Literal["whole", "lines"]
"""Whether a text is one caption, or each of its lines is one."""


@dataclass(frozen=True, kw_only=True)
class Record:
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
class Reader:
    """What is the same for every line of a dataset."""

    folder: Path
    allow_outside: bool
    captions: CaptionMode
    skip: Sequence[Path]
    """Folders inside the dataset's whose media are no samples."""
    columns: Sequence[Column]
    edits: bool
    """Whether the model takes references."""
    image_folders: bool
    """Whether a folder of numbered images is a clip."""

    def check_media(self, where: str, paths: Sequence[str]) -> None:
        """Refuse what is no media file by its name, so that the line is told which says so.

        Raises:
            UserError: Naming the path.
        """
        try:
            for path in paths:
                there = status(self.folder / path)
                if there is None:
                    refuse_backslashes(path)
                if not (there is not None and stat.S_ISDIR(there.st_mode) and self.image_folders):
                    kind_by_name(Path(path))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

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


def json_lines(reader: Reader, path: Path, text: str) -> Iterator[Record]:
    """The entries of a file with a JSON object in each line."""
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
            yield Record(media=where, problem=UserError(f"{where} is not valid JSON ({reason}); correct the line"))
        except RecursionError:
            yield Record(media=where, problem=UserError(f"{where} is nested too deeply; correct the line"))
        except ValueError:  # Python's limit on the digits of an integer
            yield Record(media=where, problem=UserError(f"{where} has a number of too many digits; correct the line"))
        except UserError as error:
            yield Record(media=where, problem=error)


def json_list(reader: Reader, path: Path, text: str) -> Iterator[Record]:
    """The entries of a JSON list of objects.

    Raises:
        UserError: If it is none.
    """
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
            yield Record(media=where, problem=error)


def _object(where: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise UserError(f"{where} has {twice!r} twice; remove one")
    return found


def csv_rows(reader: Reader, path: Path, text: str) -> Iterator[Record]:
    """The entries of a table with its columns' names in the first line.

    Raises:
        UserError: If it is none, or its columns cannot be used.
    """
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    try:
        where = f"{path} line 1"
        names = rows.fieldnames or []
        controls = control_headers(where, names, reader.columns, media=media_columns(names), other=_OTHER)
        plain = [name for name in names if name not in controls]
        lists = [name for name, meant in controls.items() if len(meant) > 1]
        only_column(where, plain, media_columns(plain), "media")
        only_column(where, plain, CAPTION_COLUMNS, "caption")
        _reference_columns(reader, where, plain)
        for row in rows:
            where = f"{path} line {rows.line_num}"
            try:
                if None in row:
                    raise UserError(
                        f"{where} has more fields than the header; put captions with commas in double quotes"
                    )
                given = {name: _csv_list(f"{where}: {name!r}", row[name]) for name in lists}
                yield _row(reader, where, {**row, **given}, _csv_paths)
            except UserError as error:
                yield Record(media=where, problem=error)
    except csv.Error as error:
        raise UserError(f"{path} line {rows.line_num} is not valid CSV ({error}); correct the file") from error


def _row(
    reader: Reader, where: str, row: Mapping[str, object], paths: Callable[[str, object], tuple[str, ...]]
) -> Record:
    """The entry of one row of metadata; `paths` reads its reference column."""
    headers = control_headers(where, row, reader.columns, media=media_columns(row), other=_OTHER)
    plain = {name: value for name, value in row.items() if name not in headers}
    column = only_column(where, plain, media_columns(plain), "media")
    (media,) = _texts(f"{where}: {column!r}", [row[column]])
    column = only_column(where, plain, CAPTION_COLUMNS, "caption")
    given = row[column]
    named = f"{where}: {column!r}"
    captions = reader.split(named, _texts(named, given if isinstance(given, list) else [given]))
    references = tuple(
        path for name in _reference_columns(reader, where, plain) for path in paths(f"{where}: {name!r}", row[name])
    )
    controls = control_values(where, row, reader.columns, headers)
    reader.check_media(where, (media, *references))
    return Record(media=media, captions=captions, references=references, controls=controls)


def _reference_columns(reader: Reader, where: str, headers: Collection[str]) -> tuple[str, ...]:
    return reference_columns(where, headers, edits=reader.edits, model_columns=[each.name for each in reader.columns])


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


def _csv_list(where: str, given: object) -> object:
    """A field that may be a list, as that or as written: the name of a file may begin with a bracket."""
    return list(_csv_paths(where, given)) if isinstance(given, str) and _LIST.match(given) else given


def _texts(where: str, values: Sequence[object]) -> tuple[str, ...]:
    """Values that are texts with something in them, at least one."""
    texts = tuple(value.strip() for value in values if isinstance(value, str) and value.strip())
    if not texts or len(texts) < len(values):
        raise UserError(f"{where} is empty or no text; fill it in or remove the line")
    return texts
