"""Which media files a dataset folder names, and the caption of each: metadata file, or a text file beside each clip."""

import csv
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ditkit_core.errors import UserError
from ditkit_core.files import inside
from ditkit_core.media import IMAGE_SUFFIXES, VIDEO_SUFFIXES, kind_of, status

MEDIA_COLUMNS = ("file_name", "video", "image", "file_path", "path")
CAPTION_COLUMNS = ("text", "prompt", "caption")
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a dataset: a media file and its caption, or what is wrong with the line."""

    media: str
    """Path as written, relative to the dataset folder or absolute; the line's place when it names no file."""
    caption: str = ""
    problem: UserError | None = None


def list_entries(folder: Path, metadata: str, *, allow_outside: bool) -> list[Entry]:
    """Everything that a dataset folder names, in a fixed order; problems of single entries are part of the list.

    Args:
        folder: The dataset folder.
        metadata: A .jsonl or .csv file, relative to the folder; empty: metadata.jsonl or metadata.csv if there is one,
            otherwise every media file with a caption of the same name beside it.
        allow_outside: Whether captions may lie outside the folder, behind links.

    Raises:
        UserError: If the metadata as a whole cannot be used.
    """
    found = [metadata] if metadata else [name for name in METADATA_NAMES if status(folder / name) is not None]
    if len(found) > 1:
        raise UserError(f"{folder} has both {' and '.join(found)}; name the right one in data.metadata")
    if not found:
        return list(_beside(folder, allow_outside))
    path = folder / found[0]
    at_path = status(path)
    if at_path is None:
        raise UserError(f"data.metadata {path} does not exist; correct the path or leave data.metadata empty")
    if not stat.S_ISREG(at_path.st_mode):
        raise UserError(f"metadata {path} is a folder or no plain file; rename it or remove it")
    readers = {".jsonl": _json_lines, ".csv": _csv_rows}
    if path.suffix.lower() not in readers:
        raise UserError(f"data.metadata {path} is of no known kind; accepted are {' and '.join(readers)}")
    return list(readers[path.suffix.lower()](folder, path, _text(path)))


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it again as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its permissions or remove it") from error


def _beside(folder: Path, allow_outside: bool) -> Iterator[Entry]:
    for media in _media_files(folder):
        caption = str(Path(media).with_suffix(".txt"))
        try:
            at_media = status(folder / media)
            if at_media is not None and stat.S_ISDIR(at_media.st_mode):
                raise UserError(f"{folder / media} is a folder, not a media file; rename it or remove it")
            at_caption = status(folder / caption)
            if at_caption is None or not stat.S_ISREG(at_caption.st_mode):
                raise UserError(f"{folder / media} has no caption; write one to {folder / caption}")
            text = _text(inside(folder, caption, allow_outside=allow_outside)).strip()
            if not text:
                raise UserError(f"caption {folder / caption} is empty; write one or remove the clip")
            yield Entry(media=media, caption=text)
        except UserError as error:
            yield Entry(media=media, problem=error)


def _media_files(folder: Path) -> Iterator[str]:
    """Relative paths of media files, and of folders called like one; hidden ones are ignored, links followed once."""
    visited = set()
    for place, folders, names in os.walk(folder, onerror=_cannot_list, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
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


def _json_lines(folder: Path, path: Path, text: str) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise UserError(f'{where} is no JSON object; write {{"file_name": "clip.mp4", "text": "caption"}}')
            yield _row(folder, where, row)
        except json.JSONDecodeError as error:
            reason = f"{error.msg}, column {error.colno}"
            yield Entry(media=where, problem=UserError(f"{where} is not valid JSON ({reason}); correct the line"))
        except RecursionError:
            yield Entry(media=where, problem=UserError(f"{where} is nested too deeply; correct the line"))
        except ValueError:  # Python's limit on the digits of an integer
            yield Entry(media=where, problem=UserError(f"{where} has a number of too many digits; correct the line"))
        except UserError as error:
            yield Entry(media=where, problem=error)


def _csv_rows(folder: Path, path: Path, text: str) -> Iterator[Entry]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        _column(f"{path} line 1", reader.fieldnames or [], MEDIA_COLUMNS, "media")
        _column(f"{path} line 1", reader.fieldnames or [], CAPTION_COLUMNS, "caption")
        captions = [name for name in reader.fieldnames or [] if name in CAPTION_COLUMNS]
        if len(captions) > 1:
            raise UserError(
                f"{path} line 1 has {len(captions)} caption columns, {', '.join(captions)}; remove or rename all but one"
            )
        for row in reader:
            where = f"{path} line {reader.line_num}"
            try:
                if None in row:
                    raise UserError(
                        f"{where} has more fields than the header; put captions with commas in double quotes"
                    )
                yield _row(folder, where, row)
            except UserError as error:
                yield Entry(media=where, problem=error)
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num} is not valid CSV ({error}); correct the file") from error


def _row(folder: Path, where: str, row: dict[str, object]) -> Entry:
    """The entry of one row of metadata."""
    values = []
    for names, what in ((MEDIA_COLUMNS, "media"), (CAPTION_COLUMNS, "caption")):
        column = _column(where, row, names, what)
        value = row[column]
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{where}: {column!r} is empty or no text; fill it in or remove the line")
        values.append(value.strip())
    try:
        kind_of(Path(values[0]))
        status(folder / values[0])
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return Entry(media=values[0], caption=values[1])


def _column(where: str, found: Iterable[str], accepted: tuple[str, ...], what: str) -> str:
    """The first of the accepted columns that is there."""
    for name in accepted:
        if name in found:
            return name
    raise UserError(
        f"{where} has no {what} column: found {', '.join(found) or 'none'}; accepted: {', '.join(accepted)}"
    )
