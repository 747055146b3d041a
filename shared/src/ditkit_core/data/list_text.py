"""The text of a list that has captions (JSON lines, a JSON list or CSV): its rows, and the same text
with other captions in some of them. The rest of a row stays as it is."""

import csv
import functools
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ditkit_core.data.columns import CAPTION_COLUMNS, media_columns
from ditkit_core.data.side_names import plain_name
from ditkit_core.errors import UserError


class RowEdit(NamedTuple):
    """Another caption for a row of a list."""

    row: int
    """Number of the row, from 0."""
    media: str
    """The media file that it is about, as the list names it."""
    before: str
    """The caption, or all of them, line by line."""
    after: str


def edited_list(path: Path, text: str, edits: Iterable[RowEdit]) -> str:
    """The text of a list after all of some edits; several captions of a row stay several, a line
    each.

    Raises:
        UserError: If a row has another caption than before, or is about another file; or if it
            has several captions of several lines.
    """
    rows, captions = list_rows(path, text), dict[int, str | list[str]]()
    for edit in edits:
        stored = caption_now(rows, edit.row, edit.media)
        if stored is None or stored.split() != edit.before.split():  # a page may show other spaces
            raise UserError(
                f"{path} has another caption of {edit.media} by now; read the list again"
            )
        captions[edit.row] = edit.after
        row = rows[edit.row]
        if isinstance(several := row.get(_column(row)), list):
            if any("\n" in str(one).strip() for one in several):
                raise UserError(
                    f"{path} has several captions of several lines for {edit.media}; edit the list"
                )
            captions[edit.row] = [line.strip() for line in edit.after.split("\n") if line.strip()]
    return with_captions(path, text, captions)


def json_value(where: str, text: str, unit: str) -> object:
    """The value of a JSON text; `unit` it is, a line or a file, is for messages."""
    try:
        return json.loads(text, object_pairs_hook=functools.partial(_object, where))
    except json.JSONDecodeError as error:
        where += f" line {error.lineno}" if unit == "file" else ""
        reason = f"is not valid JSON ({error.msg}, column {error.colno})"
    except RecursionError:
        reason = "is nested too deeply"
    except ValueError:  # Python's limit on the digits of an integer
        reason = "has a number with too many digits"
    raise UserError(f"{where} {reason}; correct the {unit}")


def _object(where: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    # json.loads keeps the last of two equal keys: one caption would silently replace the other.
    if len(fields) < len(pairs):
        duplicate = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise UserError(f"{where} has {duplicate!r} twice; remove one")
    return fields


def list_rows(path: Path, text: str) -> list[dict[str, Any]]:
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


def row_caption(row: Mapping[str, Any]) -> str:
    """The caption of a row, or all of them; empty if there is none."""
    value = row.get(_column(row))
    texts = value if isinstance(value, list) else [value]
    return "\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())


def caption_now(rows: Sequence[Mapping[str, Any]], number: int | None, media: str) -> str | None:
    """The caption of a row, or all of them; None if it is not, or no more, about a media file."""
    row = rows[number] if number is not None and number < len(rows) else {}
    names = [str(row.get(name, "")).strip() for name in media_columns(row)]
    return row_caption(row) if plain_name(media) in map(plain_name, names) else None


def with_captions(path: Path, text: str, captions: Mapping[int, str | list[str]]) -> str:
    """The text of a list with captions in some of its rows, by number; the other rows stay as they
    are."""
    if not captions:
        return text
    if path.suffix.lower() == ".csv":
        names, rows = _table(path, text)
        if len(set(names)) < len(names):  # a reader of rows keeps one of them
            raise UserError(f"{path} has several columns of the same name; give each its own")
        column, output = _column(names), io.StringIO(newline="")
        writer = csv.DictWriter(output, dict.fromkeys([*names, column]), lineterminator="\n")
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow(row | ({column: captions[number]} if number in captions else {}))
        return output.getvalue()
    rows = list_rows(path, text)
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
