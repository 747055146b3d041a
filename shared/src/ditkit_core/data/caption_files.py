"""The captions of a dataset as they are stored: which media files have one, and writing more of
them where the dataset keeps them, in a text next to each file or in the column of a list.

A person's captions are never replaced by accident: a hidden file in the dataset's folder records a
digest of each caption that was written here, and a caption that has changed since it was looked at
is left alone.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ditkit_core.data.config import DataConfig
from ditkit_core.data.control_files import control_folders
from ditkit_core.data.discovery import (
    list_file,
    list_records,
    names_of,
    read_list,
    side_file_records,
    side_files,
)
from ditkit_core.data.list_text import caption_now, list_rows, row_caption, with_captions
from ditkit_core.data.media.clip import IMAGE_SUFFIXES, VIDEO_SUFFIXES, called_like_media
from ditkit_core.data.media.files import status
from ditkit_core.data.metadata import (
    NoCaption,
    Reader,
    Record,
    csv_rows,
    json_lines,
    json_list,
)
from ditkit_core.data.references import references_by_name
from ditkit_core.errors import UserError
from ditkit_core.io.files import inside, read_text, write_text
from ditkit_core.io.locks import alone_with
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


def caption_folders(
    config: DataConfig, columns: Sequence[Column], *, edits: bool
) -> "list[CaptionFiles]":
    """The captions of all folders of a dataset, one after the other, without the files in
    `data.exclude`; arguments and errors as for `CaptionFiles`."""
    data, names = config.with_home(), set[str]()
    folders, datasets = data.folders or (data.folder,), list[CaptionFiles]()
    for folder, prefix in zip(folders, names_of(folders), strict=True):
        one = replace(data, folder=folder, folders=(), repeats=(), exclude=())
        files = CaptionFiles(Path(folder), one, columns, edits=edits)
        names |= {prefix + item.name for item in files.items}
        files.items = [item for item in files.items if prefix + item.name not in data.exclude]
        datasets.append(files)
    data.check_names(names)
    return datasets


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
        self.side_files: Mapping[str, str] = {}
        """By the name of an item, the text next to it that has its caption or gets it; empty with a
        list."""
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
                write_text(self.folder / self.side_files[item.name], f"{caption}\n")
        else:
            with alone_with(self.list_path):  # the page writes other rows of it
                text = read_list(self._reader, self.list_path)
                rows = list_rows(self.list_path, text)
                changed = [
                    item
                    for item, _ in captions
                    if caption_now(rows, item.row, item.name) != item.text
                ]
                kept = [pair for pair in captions if pair[0] not in changed]
                by_row = {item.row: caption for item, caption in kept if item.row is not None}
                if by_row:
                    write_text(self.list_path, with_captions(self.list_path, text, by_row))
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
        self.side_files = side_files(self.folder, [record.media for record in records])
        return [self._item(record, "\n".join(record.captions)) for record in records]

    def _beside_now(self, item: CaptionItem) -> str:
        path = self.folder / self.side_files[item.name]
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
        rows = list_rows(path, text)
        lacking = {number: _PLACEHOLDER for number, row in enumerate(rows) if not row_caption(row)}
        read = _READERS[path.suffix.lower()]
        records = list(read(self._reader, path, with_captions(path, text, lacking)))
        return [
            self._item(record, row_caption(row), row=number)
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
