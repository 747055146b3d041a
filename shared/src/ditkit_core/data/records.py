"""What one line of a dataset says, and how its texts are read."""

import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ditkit_core.data.columns import reference_columns
from ditkit_core.data.media.clip import kind_by_name, status
from ditkit_core.errors import UserError
from ditkit_core.io.files import refuse_backslashes
from ditkit_core.models.conditions import Column

MOST_CHARACTERS = 50_000
"""Of a caption. Text encoders read a few hundred words; what is longer is another file."""

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
class Reader:
    """What is the same for every line of a dataset."""

    folder: Path
    allow_outside: bool
    captions: Captions
    skip: Sequence[Path]
    """Folders inside the dataset's whose media are no samples."""
    columns: Sequence[Column]
    edits: bool
    """Whether the model takes references."""
    image_folders: bool
    """Whether a folder of numbered images is a clip."""

    def references(self, where: str, found: Iterable[str]) -> tuple[str, ...]:
        """The columns of references among those that are none of the model's own."""
        names = [column.name for column in self.columns]
        return reference_columns(where, found, edits=self.edits, model_columns=names)

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


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without a byte order mark.

    Raises:
        UserError: If it cannot be read, or is none.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); save it again as UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); correct its permissions or remove it") from error
