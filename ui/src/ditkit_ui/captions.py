"""Captions in text files next to pictures and clips, and in lists: read, written atomically, and
undone."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ditkit_core.data.list_text import RowEdit, edited_list, list_rows, row_caption
from ditkit_core.errors import UserError
from ditkit_core.io.files import read_text, write_text
from ditkit_ui import texts
from ditkit_ui.folders import OpenedFolders


class CaptionEdits:
    """The caption files that the page writes; it remembers what was there before."""

    def __init__(self, opened: OpenedFolders):
        self._opened = opened
        self._earlier: list[dict[Path, tuple[str | None, str]]] = []
        self._lock = threading.Lock()  # two edits at once: a list is read, checked and written

    def text(self, file: str) -> str | None:
        """A caption as its file has it; None without one."""
        path = self._opened.checked(file)
        return read_text(path) if path.is_file() else None

    def texts(self, places: Sequence[tuple[str, int | None]]) -> list[str | None]:
        """The captions as their files or rows of lists have them now; None where there is none."""
        lists: dict[str, list[dict[str, Any]]] = {}
        found: list[str | None] = []
        for file, row in places:
            if row is None:
                found.append(self.text(file))
                continue
            if file not in lists:
                path = self._opened.checked(file)
                lists[file] = list_rows(path, read_text(path))
            found.append(row_caption(lists[file][row]) if row < len(lists[file]) else None)
        return found

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
        with self._lock:
            for file, changes in rows.items():
                path, changes = self._opened.checked(file), [*filter(_differs, changes)]
                text = read_text(path)
                edits |= {path: (text, edited_list(path, text, changes))} if changes else {}
                count += len(changes)
            self._write(edits)
            if edits:
                self._earlier.append(edits)
        return count

    def undo(self) -> bool:
        """Undo the last edit; False if there is none. One that cannot be undone is forgotten."""
        with self._lock:
            if not self._earlier:
                return False
            edits = self._earlier.pop()
            self._write({file: (after, before or "") for file, (before, after) in edits.items()})
            for file, (before, _) in edits.items():
                if before is None:
                    file.unlink()
        return True

    def _write(self, edits: Mapping[Path, tuple[str | None, str]]) -> None:
        """Write all, or put back what was written before one that failed."""
        for file, (shown, _) in edits.items():
            if (read_text(file) if file.is_file() else None) != shown:
                raise UserError(texts.CAPTION_CHANGED.format(file=file.name))
        written: dict[Path, str | None] = {}
        try:
            for file, (shown, after) in edits.items():
                write_text(file, after)
                written[file] = shown
        except UserError:
            for file, shown in written.items():
                file.unlink() if shown is None else write_text(file, shown)
            raise


def _differs(edit: RowEdit) -> bool:
    return edit.before != edit.after
