"""Where the export command writes: `--out` is checked before anything is loaded, and nothing that exists is replaced."""

import filecmp
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ditkit_core.errors import UserError
from ditkit_core.io.files import temporary_path


def check_kind(out: Path, *, is_transformer: bool) -> None:
    """Refuse a path of the wrong kind: a whole transformer is written into a folder, an adapter into a file."""
    if is_transformer and (out.is_file() or out.suffix == ".safetensors"):
        raise UserError(f"--out {out} names a file, and a whole transformer is written into a folder; name a folder")
    if not is_transformer and (out.is_dir() or out.suffix != ".safetensors"):
        raise UserError(f"--out {out} is not a file name; give one that ends with .safetensors")


def check_free(paths: Iterable[Path]) -> None:
    """Refuse to replace a file, or a folder that is not empty: it may be somebody's only copy."""
    for path in paths:
        if path.is_file() or any(path.glob("*")):
            raise UserError(f"{path} exists; name another one with --out, or remove it")


@contextmanager
def put_into(folder: Path) -> Iterator[Path]:
    """A new folder next to the files of another, into which they are moved when the block ends; the same command may run again."""
    unfinished = temporary_path(folder / "export")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        written = [path.relative_to(unfinished) for path in sorted(unfinished.rglob("*")) if path.is_file()]
        for path in written:
            if (folder / path).exists() and not filecmp.cmp(folder / path, unfinished / path, shallow=False):
                raise UserError(
                    f"{folder / path} exists with another content, such as of another dtype; name another one with --out, or remove it"
                )
        for path in written:
            if not (folder / path).exists():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(unfinished / path, folder / path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
