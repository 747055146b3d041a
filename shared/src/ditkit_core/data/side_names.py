"""Names that are meant to be equal and are written differently: in another Unicode form (macOS
stores `é` as two characters), or in another case (Windows does not distinguish `a.TXT` from
`a.txt`). An exact name always comes first, and an ambiguous one is not resolved."""

import os
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def plain_name(name: str) -> str:
    """A name in the form in which different spellings of it are equal."""
    return unicodedata.normalize("NFC", name).casefold()


class Names:
    """A set of names, in which another spelling of one is found."""

    def __init__(self, names: Iterable[str]):
        self._exact = frozenset(names)
        self._spelled: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self._exact):
            self._spelled[plain_name(name)].append(name)

    def find(self, name: str) -> str | None:
        """The name in the set that is meant: the same, or the only one that differs in case or
        Unicode form; None if there is none."""
        if name in self._exact:
            return name
        similar = self._spelled.get(plain_name(name), ())
        return similar[0] if len(similar) == 1 else None

    def similar(self, name: str) -> list[str]:
        """All names in the set that differ from a name in case or Unicode form at most."""
        return list(self._spelled.get(plain_name(name), ()))


def entries(folder: Path) -> list[str]:
    """The sorted names in a folder; empty if it cannot be read."""
    with suppress(OSError, ValueError):  # ValueError: of a null byte
        return sorted(os.listdir(folder))
    return []


def stored_path(folder: Path, path: str) -> str:
    """A relative path with each part as it is stored below a folder, where another Unicode form of
    it was written.

    The case is kept as written: a list that names `A.png` may mean another file than `a.png`, and
    whoever wrote it can correct it.
    """
    if os.path.lexists(folder / path) or "\0" in path:
        return path
    directory, parts = Path(folder), []
    for part in Path(path).parts:
        wanted = unicodedata.normalize("NFC", part)
        matches = [
            name for name in entries(directory) if unicodedata.normalize("NFC", name) == wanted
        ]
        # `..`, the root of an absolute path
        if part in matches or os.path.lexists(directory / part):
            matches = [part]
        if len(matches) != 1:
            return path
        parts.append(matches[0])
        directory = directory / matches[0]
    return str(Path(*parts))
