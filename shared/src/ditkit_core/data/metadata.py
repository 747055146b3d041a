"""Reading metadata files (JSON lines, a JSON list or CSV) into records: clip, captions, references
and conditions of each line."""

import csv
import functools
import io
import json
import os
import re
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
from ditkit_core.data.list_text import json_value
from ditkit_core.data.masks import MASK
from ditkit_core.data.media.clip import kind_by_name
from ditkit_core.data.media.files import is_folder, status
from ditkit_core.data.side_names import stored_path
from ditkit_core.errors import UserError
from ditkit_core.io.files import refuse_backslashes
from ditkit_core.models.conditions import Column

MOST_CHARACTERS = 50_000
"""Limit on a caption. Text encoders read a few hundred words; a longer text is probably the wrong
file."""

_LIST = re.compile(r"\s*\[\s*[\]\"']")
"""Start of a list of paths in JSON. Single quotes match too, so that a list in Python's syntax gets
a message and is not taken for a file name."""

_OTHER = (*MEDIA_COLUMNS, *CAPTION_COLUMNS, *REFERENCE_COLUMNS, *OF_THE_MODEL)

CaptionMode = Literal["whole", "lines"]
"""Whether a text is one caption, or each of its lines is a caption."""


class NoCaption(UserError):
    """A media file has no caption, or an empty one."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a dataset: a media file and its captions, or the error in the line."""

    media: str
    """Path as written, relative to the dataset folder or absolute; file and line number of a line
    with a mistake that names no file which is here."""
    captions: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    """Paths of the reference images, as written, in order."""
    controls: Mapping[str, str] = field(default_factory=dict)
    """Conditions of the clip, and its loss mask, by column: a path as written, or a text."""
    problem: UserError | None = None


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How the lines of a dataset are read; the same for every line."""

    folder: Path
    allow_outside: bool
    captions: CaptionMode
    skip: Sequence[Path]
    """Folders inside the dataset folder whose media are not samples."""
    columns: Sequence[Column]
    edits: bool
    """Whether the model takes references."""
    image_folders: bool
    """Whether a folder of numbered images counts as one clip."""

    @property
    def files(self) -> Sequence[Column]:
        """The model's columns, and the column of the loss mask."""
        return (*self.columns, MASK)

    def stored(self, path: str) -> str:
        """A path of the dataset as it is stored, where a text has it in another Unicode form."""
        return stored_path(self.folder, path)

    def broken(self, where: str, media: Sequence[object], problem: UserError) -> "Record":
        """The record of a line with a mistake and the `media` that it names: called by its file, if
        that is here, so that the file can be left out; else by the line."""
        match media:
            case [str(path)] if path.strip() and os.path.exists(self.folder / path.strip()):
                where = self.stored(path.strip())
        return Record(media=where, problem=problem)

    def check_media(self, where: str, paths: Sequence[str]) -> None:
        """Refuse a path that is not a media file by its name. The check is made here so that the
        message names the line."""
        try:
            for path in paths:
                if status(self.folder / path) is None:
                    refuse_backslashes(path)
                if not (self.image_folders and is_folder(self.folder / path)):
                    kind_by_name(Path(path))
        except UserError as error:
            raise error.at(where) from error

    def split(self, where: str, texts: Sequence[str]) -> tuple[str, ...]:
        """The captions in some texts: one for each text, or one for each line, as `data.captions`
        says."""
        captions = []
        for text in texts:
            lines = text.splitlines() if self.captions == "lines" else [text]
            text_captions = [line.strip() for line in lines if line.strip()]
            if not text_captions:
                raise NoCaption(f"{where} is empty; fill it in or remove the clip")
            if len(text) > MOST_CHARACTERS:
                raise UserError(
                    f"{where} has {len(text)} characters, too many for a caption; shorten it, or "
                    f"name the right file"
                )
            if "\0" in text:
                raise UserError(
                    f"{where} has null bytes, like a UTF-16 or binary file; save it as UTF-8"
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{where} contains a lone surrogate (half of a character); correct the text"
                ) from error
            captions += text_captions
        return tuple(captions)


def json_lines(reader: Reader, path: Path, text: str) -> Iterator[Record]:
    """The records of a file with one JSON object per line."""
    # Not splitlines(): it also splits at U+2028 and others, which JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path} line {number}"
            yield _record(
                reader, where, functools.partial(json_value, where, line, "line"), _json_paths
            )


def json_list(reader: Reader, path: Path, text: str) -> Iterator[Record]:
    """The records of a JSON list of objects."""
    rows = json_value(str(path), text, "file")
    if not isinstance(rows, list):
        raise UserError(
            f'{path} is not a JSON list; write [{{"file_path": "clip.mp4", "text": "caption"}}, …]'
        )
    for index in range(len(rows)):
        yield _record(
            reader,
            f"{path} entry {index + 1}",
            functools.partial(rows.__getitem__, index),
            _json_paths,
        )


def json_captions(reader: Reader, path: Path, text: str) -> tuple[str, ...]:
    """The captions in the JSON object of one clip; what else it says, as downloaders write it, is
    not read."""
    row = json_value(str(path), text, "file")
    if not isinstance(row, Mapping):
        raise UserError(
            f'{path} is not a JSON object; write {{"caption": "…"}}, or the caption to a .txt of that name'
        )
    return _captions(reader, str(path), row)


def csv_rows(reader: Reader, path: Path, text: str) -> Iterator[Record]:
    """The records of a CSV table whose first line names the columns."""
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    try:
        where = f"{path} line 1"
        names = rows.fieldnames or []
        controls = control_headers(
            where, names, reader.files, media=media_columns(names), other=_OTHER
        )
        plain = [name for name in names if name not in controls]
        lists = [name for name, targets in controls.items() if len(targets) > 1]
        only_column(where, plain, media_columns(plain), "media")
        only_column(where, plain, CAPTION_COLUMNS, "caption")
        _reference_columns(reader, where, plain)
        for row in rows:
            where = f"{path} line {rows.line_num}"
            yield _record(reader, where, functools.partial(_csv_row, where, row, lists), _csv_paths)
    except csv.Error as error:
        raise UserError(
            f"{path} line {rows.line_num} is not valid CSV ({error}); correct the file"
        ) from error


def _csv_row(where: str, row: Mapping[str, object], lists: Sequence[str]) -> Mapping[str, object]:
    if None in row:  # DictReader collects surplus fields under the key None
        raise UserError(
            f"{where} has more fields than the header; put captions that contain commas in double "
            f"quotes"
        )
    # A field that is no list stays as written: the name of a single file may also begin with a
    # bracket.
    cells = {
        name: cell for name in lists if isinstance(cell := row[name], str) and _LIST.match(cell)
    }
    return {
        **row,
        **{name: list(_csv_paths(f"{where}: {name!r}", cell)) for name, cell in cells.items()},
    }


Paths = Callable[[str, object], tuple[str, ...]]
"""From the place, for messages, and the value of a reference column to its paths."""


def _record(reader: Reader, where: str, row_of: Callable[[], object], paths: Paths) -> Record:
    """The record of one row of metadata, or its error."""
    fields: Mapping[str, object] = {}
    try:
        row = row_of()
        if not isinstance(row, Mapping):
            raise UserError(
                f'{where} is not a JSON object; write {{"file_name": "clip.mp4", "text": "caption"}}'
            )
        fields = row
        return _row(reader, where, row, paths)
    except UserError as error:
        media = [fields[name] for name in media_columns(fields) if name in fields]
        return reader.broken(where, media, error)


def _row(reader: Reader, where: str, row: Mapping[str, object], paths: Paths) -> Record:
    headers = control_headers(where, row, reader.files, media=media_columns(row), other=_OTHER)
    plain = {name: value for name, value in row.items() if name not in headers}
    column = only_column(where, plain, media_columns(plain), "media")
    (media,) = map(reader.stored, _texts(f"{where}: {column!r}", [row[column]]))
    captions = _captions(reader, where, plain)
    references = tuple(
        reader.stored(path)
        for name in _reference_columns(reader, where, plain)
        for path in paths(f"{where}: {name!r}", row[name])
    )
    texts = {file_column.name for file_column in reader.files if file_column.kind == "text"}
    control_texts = control_values(where, row, reader.files, headers)
    controls = {
        name: value if name in texts else reader.stored(value)
        for name, value in control_texts.items()
    }
    reader.check_media(where, (media, *references))
    return Record(media=media, captions=captions, references=references, controls=controls)


def _captions(reader: Reader, where: str, row: Mapping[str, object]) -> tuple[str, ...]:
    """The captions in the only caption column of a row, which has one text or a list of texts."""
    column = only_column(where, row, CAPTION_COLUMNS, "caption")
    caption = row[column]
    named = f"{where}: {column!r}"
    return reader.split(named, _texts(named, caption if isinstance(caption, list) else [caption]))


def _reference_columns(reader: Reader, where: str, headers: Collection[str]) -> tuple[str, ...]:
    return reference_columns(
        where, headers, edits=reader.edits, model_columns=[column.name for column in reader.columns]
    )


def _json_paths(where: str, value: object) -> tuple[str, ...]:
    """The paths in a JSON value: one path, a list of paths, or null for none."""
    if value is None or value == []:
        return ()
    return _texts(where, value if isinstance(value, list) else [value])


def _csv_paths(where: str, cell: object) -> tuple[str, ...]:
    """The paths in a CSV field: one path, a JSON list of paths, or nothing."""
    if not isinstance(cell, str) or not cell.strip():
        return ()
    if not cell.lstrip().startswith("["):
        return _texts(where, [cell])
    try:
        return _json_paths(where, json.loads(cell))
    except ValueError as error:
        raise UserError(
            f'{where} is not a JSON list; write one path, or ["first.png", "second.png"]'
        ) from error


def _texts(where: str, values: Sequence[object]) -> tuple[str, ...]:
    """The values as stripped texts; there must be at least one, and none may be empty."""
    texts = tuple(value.strip() for value in values if isinstance(value, str) and value.strip())
    if not texts or len(texts) < len(values):
        raise UserError(f"{where} is empty or not a text; fill it in or remove the line")
    return texts
