"""Captions in text files next to pictures and clips: read, written atomically, and undone."""

from collections.abc import Mapping
from pathlib import Path

from ditkit_core.errors import UserError
from ditkit_core.io.files import read_text, write_text
from ditkit_ui import texts
from ditkit_ui.folders import OpenedFolders


class CaptionEdits:
    """The caption files that the page writes; it remembers what was there before."""

    def __init__(self, opened: OpenedFolders):
        self._opened = opened
        self._earlier: list[dict[Path, tuple[str | None, str]]] = []

    def text(self, file: str) -> str | None:
        """A caption as its file has it; None without one."""
        path = self._opened.checked(file)
        return read_text(path) if path.is_file() else None

    def write(self, captions: Mapping[str, tuple[str | None, str]]) -> int:
        """Write captions, all or none of them.

        Args:
            captions: By caption file the text that the page showed, None where there was no file,
                and the new one.

        Returns:
            How many differed.

        Raises:
            UserError: If one was changed by another program meanwhile.
        """
        edits = {
            self._opened.checked(file): pair
            for file, pair in captions.items()
            if (pair[0] or "") != pair[1]
        }
        self._write(edits)
        if edits:
            self._earlier.append(edits)
        return len(edits)

    def undo(self) -> bool:
        """Undo the last edit; False if there is none."""
        if not self._earlier:
            return False
        edits = self._earlier[-1]
        self._write({file: (after, before or "") for file, (before, after) in edits.items()})
        for file, (before, _) in self._earlier.pop().items():
            if before is None:
                file.unlink()
        return True

    def _write(self, edits: Mapping[Path, tuple[str | None, str]]) -> None:
        for file, (shown, _) in edits.items():
            if (read_text(file) if file.is_file() else None) != shown:
                raise UserError(texts.CAPTION_CHANGED.format(file=file.name))
        for file, (_, after) in edits.items():
            write_text(file, after)
