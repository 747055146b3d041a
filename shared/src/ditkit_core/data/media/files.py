"""Opening the files of a dataset: each is a regular file inside its folder, and no larger than a
file of its kind can be."""

import errno
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ditkit_core.config.foreign_files import HEAD_BYTES, mark_of
from ditkit_core.errors import EnvironmentFault, UserError
from ditkit_core.io.files import head_of, inside, read_text

if TYPE_CHECKING:
    from av.container import InputContainer

CAPTION_SUFFIXES = (".txt", ".caption")
"""Extensions of the caption file next to a clip; the first one that exists is read."""
MOST_TEXT_BYTES = 2**24
"""Largest file of captions or of a condition's text. Reading a larger one, which cannot be meant,
could take all memory."""
MOST_LIST_BYTES = 2**30
"""Largest file that lists samples."""

_OF_THE_MACHINE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO)


def refuse_shortage(path: Path, error: OSError | MemoryError) -> None:
    """Raise an error of its own if reading failed for a reason that is not in the file.

    Raises:
        EnvironmentFault: If memory, threads or file handles are short, or the disk fails.
    """
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM
    if number in _OF_THE_MACHINE:
        cause = (
            "the disk fails" if number == errno.EIO else "memory, threads or open files are short"
        )
        remedy = (
            "check the disk"
            if number == errno.EIO
            else "stop other programs, or raise the limits (ulimit -a)"
        )
        raise EnvironmentFault(
            f"{path} cannot be read because {cause} ({os.strerror(number)}), not because of its "
            f"content; {remedy}, and start again"
        ) from error


def is_readable(path: Path) -> bool:
    """Whether the disk gives every byte of a file."""
    try:
        with path.open("rb") as file:
            while file.read(2**20):
                pass
    except OSError:
        return False
    return True


def refuse_foreign(path: Path, kind: str) -> None:
    """Raise an error of its own if a file that cannot be read as its `kind`, `image` or `video`, is
    recognised as something else."""
    mark = mark_of(head_of(path), path.name)
    other = {"image": "is a video", "video": "is an image"}[kind]
    if mark == other:
        raise UserError(
            f"{path} {other} by its content; rename it so that its ending says so, or remove it"
        )
    if mark not in ("", f"is an {kind}", f"is a {kind}"):
        raise UserError(f"{path} {mark}, or remove it")


def open_container(path: Path, formats: str) -> "InputContainer":
    """Open a file with libav, as one of some formats (libav's names, with commas).

    libav also reads playlists and scripts, whatever the file's extension: a text file named
    clip.mp4 could refer to any other file or host. So only these formats are opened, and only the
    file itself.
    """
    import av

    # Tags may be in any encoding; they are not used. From PyAV 19 on they never fail, and `open`
    # has no such argument.
    tags: dict[str, Any] = (
        {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    )
    return av.open(
        str(path), options={"format_whitelist": formats, "protocol_whitelist": "file"}, **tags
    )


def can_allocate(num_bytes: int) -> bool:
    """Whether the system grants this much memory, which is not touched."""
    try:
        mmap.mmap(-1, num_bytes).close()
    except OSError:
        return False
    return True


def status(path: Path) -> os.stat_result | None:
    """The status of the file at a path, links followed; None if there is no file."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        refuse_shortage(path, error)
        raise UserError(
            f"{path} cannot be read ({error.strerror}); correct its name or its permissions"
        ) from error
    except ValueError as error:  # a null byte, half of a character
        raise UserError(
            f"{str(path)!r} has a character that no file name can have; correct the name"
        ) from error


def is_regular(path: Path) -> bool:
    """Whether there is a regular file, links followed. Opening a named pipe would wait until
    somebody writes to it."""
    file_status = status(path)
    return file_status is not None and stat.S_ISREG(file_status.st_mode)


def is_folder(path: Path) -> bool:
    """Whether there is a folder, links followed."""
    file_status = status(path)
    return file_status is not None and stat.S_ISDIR(file_status.st_mode)


def walk(folder: Path, *, skip: Iterable[Path] = ()) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Each folder below a folder, with the sorted names of its folders and files; hidden ones are
    left out, links followed once.

    As with `os.walk`, folders that the caller removes from the list are not entered.
    """
    visited = {os.path.realpath(path) for path in skip}
    for directory, folders, names in os.walk(folder, onerror=_cannot_list, followlinks=True):
        real = os.path.realpath(directory)
        # A link may lead back to a folder above it, which would never end. Two links to one folder
        # would list its clips twice.
        folders[:] = [] if real in visited else sorted(name for name in folders if name[0] != ".")
        if real not in visited:
            visited.add(real)
            yield Path(directory), folders, sorted(name for name in names if name[0] != ".")


def _cannot_list(error: OSError) -> None:
    refuse_shortage(Path(error.filename), error)
    raise UserError(
        f"folder {error.filename} cannot be read ({error.strerror}); correct its permissions or "
        f"remove it"
    ) from error


def read_dataset_text(
    folder: Path, name: str, *, allow_outside: bool = False, most_bytes: int = MOST_TEXT_BYTES
) -> str:
    """Read a UTF-8 text file that must be in a dataset's folder: its path is relative to that, or
    absolute."""
    path = folder / name
    inside(folder, name, allow_outside=allow_outside)
    if not is_regular(path):
        raise UserError(f"{path} is not a regular file; rename it or remove it")
    if (size := path.stat().st_size) > most_bytes:
        raise UserError(
            f"{path} has {size} bytes, more than the {most_bytes} of such a text; replace it or "
            f"remove it"
        )
    try:
        text = read_text(path)
    except UserError as error:
        if isinstance(error.__cause__, OSError):
            refuse_shortage(path, error.__cause__)
        raise
    # A clone without Git LFS has such files in place of captions and lists, which would be read as
    # if somebody had written them.
    if (mark := mark_of(text[:HEAD_BYTES].encode())).startswith(
        ("is a pointer of Git LFS", "is a web page")
    ):
        raise UserError(f"{path} {mark}")
    return text
