"""The folders that were opened: the page reads and writes nothing outside them."""

from collections.abc import Iterable
from pathlib import Path

from ditkit_core.config.nearest import path_remedy
from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path
from ditkit_ui import texts


class OpenedFolders:
    """Folders that a person named, when the page was started or in it."""

    def __init__(self, folders: Iterable[Path]):
        self._folders = [folder.resolve() for folder in folders]

    def open(self, text: str) -> Path:
        """Add a folder that a person typed; returns its full path.

        Raises:
            UserError: If there is no such folder.
        """
        folder = local_path(text.strip()).resolve()
        if not text.strip() or not folder.is_dir():
            raise UserError(texts.NO_FOLDER.format(path=folder, remedy=path_remedy(folder)))
        if folder not in self._folders:
            self._folders.append(folder)
        return folder

    def contains(self, path: Path) -> bool:
        """Whether a path, with its links followed, is inside one of them."""
        return any(path.resolve().is_relative_to(folder) for folder in self._folders)

    def checked(self, path: str | Path) -> Path:
        """The full path, with its links followed.

        Raises:
            UserError: If it is in none of the folders, or is no path at all.
        """
        try:
            resolved = local_path(str(path)).resolve()
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise UserError(texts.NOT_OPENED.format(path=str(path)[:80])) from error
        if not self.contains(resolved):
            raise UserError(texts.NOT_OPENED.format(path=resolved))
        return resolved
