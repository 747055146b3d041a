"""The captions of a dataset as they are stored: which media files have one, and writing more of
them where the dataset keeps them, in a text next to each file or in the column of a list.

A person's captions are never replaced by accident: a hidden file in the dataset's folder records a
digest of each caption that was written here, and a caption that has changed since it was looked at
is left alone.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ditkit_core.data.columns import CAPTION_COLUMNS, media_columns
from ditkit_core.data.config import DataConfig
from ditkit_core.data.control_files import control_folders
from ditkit_core.data.discovery import (
    list_file,
    list_records,
    read_list,
    side_file_records,
    side_files,
)
from ditkit_core.data.media.clip import IMAGE_SUFFIXES, VIDEO_SUFFIXES, called_like_media
from ditkit_core.data.media.files import status
from ditkit_core.data.metadata import (
    NoCaption,
    Reader,
    Record,
    csv_rows,
    json_lines,
    json_list,
    json_value,
)
from ditkit_core.data.references import references_by_name
from ditkit_core.data.side_names import plain_name
from ditkit_core.errors import UserError
from ditkit_core.io.files import inside, read_text, write_text
from ditkit_core.models.conditions import Column

RECORD_NAME = ".ditkit-captions"
"""File of a dataset's folder that records the captions that were written here, a line for each."""

_READERS = {".jsonl": json_lines, ".json": json_list, ".csv": csv_rows}
_PLACEHOLDER = "-"


class WrittenCaption(NamedTuple):
    """A caption that was written here."""

    digest: str
    settings: str
    """Digest of everything that it depends on besides its file: model, instruction, template, …"""


@dataclass(frozen=True, kw_only=True)
class CaptionItem:
    """A media file of a dataset and its caption."""

    name: str
    """As the dataset names it: relative to the folder, or absolute in a list."""
    media: Path
    text: str
    """The stored caption, or all captions as they are stored; empty if there is none."""
    references: tuple[Path, ...] = ()
    """Images that the caption's instruction edits into this one, in order."""
    row: int | None = None
    """Number of its row in the list, from 0; None if its caption is next to it."""
    problem: UserError | None = None
    """Why it cannot be captioned."""


class CaptionFiles:
    """The captions of one folder of a dataset."""

    def __init__(self, folder: Path, config: DataConfig, columns: Sequence[Column], *, edits: bool):
        """List the media files, with the captions that they have.

        Args:
            columns: The model's conditions, whose folders have no samples.
            edits: Whether the model takes references.

        Raises:
            UserError: If the dataset cannot be read, or lists its captions in a form that is not
                written here.
        """
        controls = control_folders(config.controls, columns, config.masks)
        self.folder = folder
        self._reader = Reader(
            folder=folder,
            allow_outside=config.allow_outside,
            captions="whole",
            skip=[*([Path(config.references)] if config.references else []), *controls.values()],
            columns=columns,
            edits=edits,
            image_folders=config.image_folders,
        )
        self.list_path = list_file(self._reader, config.metadata)
        """The list that has the captions; None if they are next to the media files."""
        self.written = _read_record(folder / RECORD_NAME)
        """By the name of an item, its caption that was written here last."""
        self._side_files: Mapping[str, str] = {}
        self.items = self._beside() if self.list_path is None else self._listed(self.list_path)
        if not self.items:
            raise UserError(
                f"{folder} has no media file; name a folder with images or clips, accepted: "
                f"{' '.join(sorted(VIDEO_SUFFIXES | IMAGE_SUFFIXES))}"
            )
        references, _ = references_by_name(config, [_id(item.name) for item in self.items])
        self.items = [self._with_references(item, references, config) for item in self.items]

    def is_ours(self, item: CaptionItem) -> bool:
        """Whether a caption was written here, and nobody has changed it since."""
        written = self.written.get(item.name)
        return bool(item.text) and written is not None and written.digest == _digest(item.text)

    def write(
        self, captions: Sequence[tuple[CaptionItem, str]], settings: str
    ) -> list[CaptionItem]:
        """Write captions, a file atomically each, and record them.

        Args:
            captions: Each with its item, whose stored caption is replaced.
            settings: Digest for `WrittenCaption`.

        Returns:
            The items whose stored caption has changed since it was looked at; it stays.
        """
        if self.list_path is None:
            changed = [item for item, _ in captions if self._beside_now(item) != item.text]
            kept = [pair for pair in captions if pair[0] not in changed]
            for item, caption in kept:
                write_text(self.folder / self._side_files[item.name], f"{caption}\n")
        else:
            text = read_list(self._reader, self.list_path)
            rows = _rows(self.list_path, text)
            changed = [item for item, _ in captions if not _is_same(rows, item)]
            kept = [pair for pair in captions if pair[0] not in changed]
            by_row = {item.row: caption for item, caption in kept if item.row is not None}
            if by_row:
                write_text(self.list_path, _with_captions(self.list_path, text, by_row))
        lines = []
        for item, caption in kept:
            self.written[item.name] = WrittenCaption(_digest(caption), settings)
            entry = {"file": item.name, "caption": _digest(caption), "settings": settings}
            lines.append(json.dumps(entry) + "\n")
        # After the captions: one that is not recorded counts as a person's, which is the safe side.
        # A torn line is skipped when it is read.
        path = self.folder / RECORD_NAME
        try:
            with path.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(lines)
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}; free some space or correct its permissions"
            ) from error
        return changed

    def _beside(self) -> list[CaptionItem]:
        """The items of a folder whose captions are next to the media files."""
        records = list(side_file_records(self._reader))
        self._side_files = side_files(self.folder, [record.media for record in records])
        return [self._item(record, "\n".join(record.captions)) for record in records]

    def _beside_now(self, item: CaptionItem) -> str:
        path = self.folder / self._side_files[item.name]
        # No text: none was there either, or the caption is in another file, which a text precedes.
        return read_text(path).strip() if status(path) is not None else item.text

    def _listed(self, path: Path) -> list[CaptionItem]:
        """The items of a list. Rows without a caption get one for the moment, so that everything
        else in them is read and checked as before training."""
        if path.suffix.lower() not in _READERS:
            list_records(self._reader, path.name)  # names what is wrong with a format
            raise UserError(
                f"{path} has a caption list next to it, which is not written here; write "
                f"metadata.jsonl with a line "
                '{"file_name": "clip.mp4"} for each file, or remove both lists to have a text next '
                "to each file"
            )
        text = read_list(self._reader, path)
        rows = _rows(path, text)
        lacking = {number: _PLACEHOLDER for number, row in enumerate(rows) if not _caption(row)}
        read = _READERS[path.suffix.lower()]
        records = list(read(self._reader, path, _with_captions(path, text, lacking)))
        return [
            self._item(record, _caption(row), row=number)
            for number, (record, row) in enumerate(zip(records, rows, strict=True))
        ]

    def _item(self, record: Record, text: str, row: int | None = None) -> CaptionItem:
        problem = None if isinstance(record.problem, NoCaption) else record.problem
        allow_outside = self._reader.allow_outside
        try:
            if problem is None:
                for name in (record.media, *record.references):
                    inside(self.folder, name, allow_outside=allow_outside)
        except UserError as error:
            problem = error
        return CaptionItem(
            name=record.media,
            media=self.folder / record.media,
            text=text.strip(),
            references=tuple(self.folder / name for name in record.references),
            row=row,
            problem=problem,
        )

    def _with_references(
        self,
        item: CaptionItem,
        references: Mapping[str, tuple[str, ...] | UserError],
        config: DataConfig,
    ) -> CaptionItem:
        match = references.get(_id(item.name), ())
        if isinstance(match, UserError):
            return replace(item, problem=item.problem or match)
        paths = tuple(Path(config.references) / name for name in match)
        return replace(item, references=item.references or paths)


def _id(name: str) -> str:
    path = Path(name)
    return (path.with_suffix("") if called_like_media(path) else path).as_posix()


def _digest(caption: str) -> str:
    text = caption.strip().encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _read_record(path: Path) -> dict[str, WrittenCaption]:
    """What was written here, by the name of the item; lines that are torn or damaged are
    skipped."""
    written: dict[str, WrittenCaption] = {}
    lines = read_text(path).split("\n") if status(path) is not None else []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            written[str(entry["file"])] = WrittenCaption(
                str(entry["caption"]), str(entry["settings"])
            )
    return written


def _rows(path: Path, text: str) -> list[dict[str, Any]]:
    """The rows of a list, in order. All are checked: the list is written again as a whole."""
    if path.suffix.lower() == ".csv":
        return _table(path, text)[1]
    if path.suffix.lower() == ".json":
        value = json_value(str(path), text, "file")
        if not isinstance(value, list):
            raise UserError(f'{path} is not a JSON list; write [{{"file_path": "clip.mp4"}}, …]')
        numbered = [(f"entry {number}", row) for number, row in enumerate(value, start=1)]
    else:
        numbered = [
            (f"line {number}", json_value(f"{path} line {number}", line, "line"))
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
    rows = [row for _, row in numbered if isinstance(row, dict)]
    if other := next((where for where, row in numbered if not isinstance(row, dict)), ""):
        raise UserError(f'{path} {other} is not a JSON object; write {{"file_name": "clip.mp4"}}')
    return rows


def _table(path: Path, text: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The names of a CSV file's columns, and its rows."""
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    try:
        rows = []
        for row in table:
            if None in row:  # DictReader collects surplus fields under the key None
                raise UserError(
                    f"{path} line {table.line_num} has more fields than the header; put texts that "
                    f"contain commas in double quotes"
                )
            rows.append(row)
    except csv.Error as error:
        raise UserError(
            f"{path} line {table.line_num} is not valid CSV ({error}); correct the file"
        ) from error
    return list(table.fieldnames or []), rows


def _column(names: Iterable[str]) -> str:
    """The column that has captions, or gets them."""
    return next((name for name in CAPTION_COLUMNS if name in set(names)), CAPTION_COLUMNS[0])


def _caption(row: Mapping[str, Any]) -> str:
    """The caption of a row, or all of them; empty if there is none."""
    value = row.get(_column(row))
    texts = value if isinstance(value, list) else [value]
    return "\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())


def _is_same(rows: Sequence[Mapping[str, Any]], item: CaptionItem) -> bool:
    """Whether a list still has an item's row, with the caption that it had."""
    row = rows[item.row] if item.row is not None and item.row < len(rows) else {}
    names = [str(row.get(name, "")).strip() for name in media_columns(row)]
    return plain_name(item.name) in map(plain_name, names) and _caption(row) == item.text


def _with_captions(path: Path, text: str, captions: Mapping[int, str]) -> str:
    """The text of a list with captions in some of its rows, by number; the other rows stay as they
    are."""
    if not captions:
        return text
    if path.suffix.lower() == ".csv":
        names, rows = _table(path, text)
        column, output = _column(names), io.StringIO(newline="")
        writer = csv.DictWriter(output, dict.fromkeys([*names, column]), lineterminator="\n")
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow(row | ({column: captions[number]} if number in captions else {}))
        return output.getvalue()
    rows = _rows(path, text)
    for number, caption in captions.items():
        rows[number][_column(rows[number])] = caption
    # As the list is written: with escapes, which keep half of a character readable, or without.
    escapes = "\\u" in text
    if path.suffix.lower() == ".json":
        return json.dumps(rows, ensure_ascii=escapes, indent=2) + "\n"
    lines = text.split("\n")
    line_of_row = [index for index, line in enumerate(lines) if line.strip()]
    for number in captions:
        lines[line_of_row[number]] = json.dumps(rows[number], ensure_ascii=escapes)
    return "\n".join(lines)
