"""What somebody most likely meant: the nearest of several words, keys or paths. A bad guess is
worse than none."""

import difflib
import os
import re
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ditkit_core.errors import UserError

_CLOSE = 0.65
"""Least likeness of a suggested key: `rnak` has 0.75 with `rank`."""
_CLOSE_NAME = 0.7
"""Least likeness of a suggested file, by its stem: `clip` has 0.89 with `clips`, `dataset` 0.73
with `data`."""
_MOST_ENTRIES = 10_000
"""Names of a folder that are compared."""


def nearest_key(key: str, keys: Iterable[str]) -> str:
    """The valid key that an unknown key most likely means; empty if none is close.

    The last part of the name counts twice as much as the section, so `optim.rank` finds
    `adapter.rank`. Initials count as the name, so `learning_rate` finds `lr`.
    """
    section, _, name = key.rpartition(".")
    initials = "".join(word[:1] for word in name.split("_"))

    def likeness(candidate: str) -> tuple[float, float]:
        its_section, _, its_name = candidate.rpartition(".")
        same_name = 1.0 if its_name == initials else _likeness(name, its_name)
        return same_name + _likeness(section, its_section) / 2, same_name

    nearest = max(keys, key=likeness)
    return nearest if likeness(nearest)[1] >= _CLOSE else ""


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def nearest_word(word: str, words: Iterable[str], at_least: float = _CLOSE) -> str:
    """The word that another one most likely means, whatever their case and Unicode form; empty if
    none is close."""
    plain = _plain(word)
    scored = [(_likeness(plain, _plain(candidate)), candidate) for candidate in words]
    likeness, nearest = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return nearest if likeness >= at_least else ""


def check_arguments(function: str, names: Iterable[str], candidates: Iterable[str]) -> None:
    """Refuse keyword arguments that a function of the library does not have."""
    candidates = tuple(candidates)
    for name in names:
        if name not in candidates:
            near = nearest_word(name, candidates)
            remedy = f"did you mean {near}?" if near else f"choose among {', '.join(candidates)}"
            raise UserError(f"{function} has no argument {name!r}; {remedy}")


def _plain(word: str) -> str:
    return unicodedata.normalize("NFC", word).casefold()


def path_remedy(path: str | Path, *, folders: Iterable[Path] = ()) -> str:
    """What to do about a path that does not exist: the path that is most likely meant, or where it
    ends.

    Args:
        folders: Folders that a relative path may have been meant from, besides the working
            directory.

    Returns:
        A clause for the end of a message: `did you mean runs/cats?`, `correct the path: runs
        exists, and contains no cast`.
    """
    written = str(path)
    if os.sep == "/" and (windows := re.fullmatch(r"([A-Za-z]):[\\/](.*)", written, re.DOTALL)):
        mounted = Path(f"/mnt/{windows[1].lower()}") / windows[2].replace("\\", "/")
        there = (
            f"did you mean {mounted}?"
            if os.path.exists(mounted)
            else "write its path on this machine"
        )
        return f"it is a path of Windows; {there}"
    if os.sep == "/" and "\\" in written:
        return (
            f"it is written with backslashes, as on Windows; write {written.replace(chr(92), '/')}"
        )
    if re.search(r"(^|/)(https?|ftp|s3|gs|hf):/", written):
        return "it is an address; download it, and write the path of the file"
    if written != written.strip():
        return "leave out the spaces around it"
    with suppress(ValueError):  # of a character that no path can have
        written = os.path.expanduser(written)
    target = Path(written)
    if not target.is_absolute() and (
        elsewhere := [folder / target for folder in folders if os.path.exists(folder / target)]
    ):
        return f"paths start at the working directory; did you mean {elsewhere[0]}?"
    folder, missing = target.parent, [target.name]
    while not os.path.isdir(folder) and folder != folder.parent:
        missing.insert(0, folder.name)
        folder = folder.parent
    corrected = folder
    for name in missing:
        if not (near := _entry_like(corrected, name)):
            where = (
                f": {folder} exists, and contains no {missing[0]}"
                if len(missing) > 1 and folder.name
                else ""
            )
            return f"correct the path{where}"
        corrected = corrected / near
    if corrected == target:
        return "correct the path"
    if unicodedata.normalize("NFC", str(corrected)) == unicodedata.normalize("NFC", str(target)):
        return "a name that looks the same is there in another Unicode form, as macOS stores it; rename it, or copy the name from there"
    return f"did you mean {corrected}?"


def _entry_like(folder: Path, name: str) -> str:
    """The entry of a folder that a name most likely means; empty if none is close."""
    names: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry, _ in zip(entries, range(_MOST_ENTRIES), strict=False)]
    if name in names:
        return name
    stems: dict[str, str] = {}
    for candidate in sorted(
        names, key=lambda candidate: (Path(candidate).suffix != Path(name).suffix, candidate)
    ):
        if not candidate.startswith("."):
            stems.setdefault(Path(candidate).stem, candidate)
    # Without suffixes, which would make `no.png` like `a.png`.
    return stems.get(nearest_word(Path(name).stem, stems, _CLOSE_NAME), "")
