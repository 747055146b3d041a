"""Captions in text files next to pictures and clips, and in lists: read, written atomically, and
undone."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ditkit_core.data.list_text import RowEdit, edited_list, list_rows, row_caption
from ditkit_core.data.media.files import CAPTION_SUFFIXES
from ditkit_core.errors import UserError
from ditkit_core.io.files import read_text, write_text
from ditkit_core.io.locks import alone_with
from ditkit_ui import texts
from ditkit_ui.folders import OpenedFolders

_AT_ONCE = 4
"""Files that are written at the same time."""


class CaptionEdits:
    """The caption files that the page writes, or a command for it.

    Args:
        undos: Gets a function for each edit, which undoes it.
    """

    def __init__(self, opened: OpenedFolders, undos: list[Callable[[], bool]]):
        self._opened, self._undos = opened, undos
        self._watched: dict[Path, str | None] = {}
        self._lock = threading.RLock()  # two edits at once: a list is read, checked and written

    def text(self, file: str) -> str | None:
        """A caption as its file has it; None without one."""
        return _stored(self._opened.checked(file))

    def texts(self, sources: Sequence[tuple[str, int | None]]) -> list[str | None]:
        """The captions as their files or rows of lists have them now; None where there is none."""
        lists: dict[str, list[dict[str, Any]]] = {}
        captions: list[str | None] = []
        for file, row in sources:
            if row is None:
                captions.append(self.text(file))
                continue
            if file not in lists:
                path = self._opened.checked(file)
                lists[file] = list_rows(path, read_text(path))
            captions.append(row_caption(lists[file][row]) if row < len(lists[file]) else None)
        return captions

    def write(
        self,
        captions: Mapping[str, tuple[str | None, str]],
        rows: Mapping[str, Sequence[RowEdit]] = MappingProxyType({}),
    ) -> int:
        """Write captions, all or none of them.

        Args:
            captions: By caption file the text that the page showed, None where there was no file,
                and the new one.
            rows: By list the rows to change.

        Returns:
            How many differed.

        Raises:
            UserError: If one was changed by another program meanwhile, or cannot be written.
        """
        edits = {
            self._opened.checked(file): pair
            for file, pair in captions.items()
            if (pair[0] or "") != pair[1]
        }
        count = len(edits)
        with self._alone_with_lists(map(self._opened.checked, rows)):
            self.note_changes()
            for file, changes in rows.items():
                path, changes = self._opened.checked(file), [*filter(_differs, changes)]
                text = read_text(path)
                edits |= {path: (text, edited_list(path, text, changes))} if changes else {}
                count += len(changes)
            self._write(edits)
            self._watch_again(edits)
            if edits:
                self._undos.append(partial(self._undo, edits))
        return count

    def watch(self, files: Iterable[str]) -> None:
        """Remember what is in caption files, before a command writes them."""
        with self._lock:
            self.note_changes()
            self._watched = {path: _stored(path) for path in map(self._opened.checked, files)}

    def note_changes(self) -> None:
        """Take what was written into the watched files meanwhile as one edit: it is undone after
        those that come later."""
        with self._lock:
            before, self._watched = self._watched, {path: _stored(path) for path in self._watched}
            edits = {path: (before[path], now) for path, now in self._watched.items()}
            if edits := {path: pair for path, pair in edits.items() if pair[0] != pair[1]}:
                self._undos.append(partial(self._undo, edits))

    def _undo(self, edits: Mapping[Path, tuple[str | None, str | None]]) -> bool:
        with self._alone_with_lists(edits):
            self._write({file: (after, before or "") for file, (before, after) in edits.items()})
            for file, (before, _) in edits.items():
                if before is None:
                    file.unlink()
            self._watch_again(edits)
        return True

    @contextmanager
    def _alone_with_lists(self, files: Iterable[Path]) -> Iterator[None]:
        """Run the block while nobody else reads and rewrites the lists among some files, in this
        process or in a command."""
        with self._lock, ExitStack() as locks:
            for file in sorted({file for file in files if file.suffix not in CAPTION_SUFFIXES}):
                locks.enter_context(alone_with(file))
            yield

    def _watch_again(self, files: Iterable[Path]) -> None:
        """What was written here is no change of a command."""
        self._watched |= {file: _stored(file) for file in files if file in self._watched}

    def _write(self, edits: Mapping[Path, tuple[str | None, str]]) -> None:
        """Write all, or put back what was written before one that failed."""
        for file, (shown, _) in edits.items():
            if _stored(file) != shown:
                raise UserError(texts.CAPTION_CHANGED.format(file=file.name))
        written: dict[Path, str | None] = {}

        def write(file: Path) -> None:
            shown, after = edits[file]
            write_text(file, after)
            written[file] = shown

        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:  # one file waits for the disk a while
                list(pool.map(write, edits))
        except UserError:
            for file, shown in written.items():
                file.unlink() if shown is None else write_text(file, shown)
            raise


def _stored(path: Path) -> str | None:
    return read_text(path) if path.is_file() else None


def _differs(edit: RowEdit) -> bool:
    return edit.before != edit.after
