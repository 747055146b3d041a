"""Checks of `--out` before anything is loaded: it names what is written, and nothing that exists is replaced."""

from collections.abc import Iterable
from pathlib import Path

from ditkit_core.errors import UserError


def check_kind(out: Path, *, whole: bool) -> None:
    """Refuse a path of the wrong kind: a whole transformer is written into a folder, an adapter into a file.

    Raises:
        UserError: With the path.
    """
    if whole and (out.is_file() or out.suffix == ".safetensors"):
        raise UserError(f"--out {out} names a file, and a whole transformer is written into a folder; name a folder")
    if not whole and (out.is_dir() or out.suffix != ".safetensors"):
        raise UserError(f"--out {out} is not a file name; give one that ends with .safetensors")


def check_free(paths: Iterable[Path]) -> None:
    """Refuse to replace a file, or a folder that is not empty: it may be somebody's only copy.

    Raises:
        UserError: With the first one.
    """
    for path in paths:
        if path.is_file() or any(path.glob("*")):
            raise UserError(f"{path} exists; name another one with --out, or remove it")
