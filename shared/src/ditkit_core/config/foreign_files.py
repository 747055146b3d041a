"""Files that people name by mistake, recognised by their first bytes: other formats, downloads that
brought something else, run files of other trainers. Nothing here reads a file."""

import re
from pathlib import Path

HEAD_BYTES = 512
"""Bytes of a file by which it is recognised."""

_FETCH = "fetch it again, with `hf download REPOSITORY FILE` if it is on the hub"
_SAFE = "get the same weights as .safetensors"
_NO_PICKLES = f"reading one runs the code in it; {_SAFE}"
_ARCHIVE = "unpack it and name the file inside"

_MARKS = tuple(
    (re.compile(pattern, re.DOTALL), description, remedy)
    for pattern, description, remedy in (
        (rb"GGUF", "is a GGUF file",
        "its quantized blocks are not read; get the same model as .safetensors in bf16 or fp8_scaled"),
        (
            rb"version https?://[\w.-]*git-lfs",
            "is a pointer of Git LFS, three lines of text in place of the file",
            f"run `git lfs pull` in its folder, or {_FETCH}",
        ),
        (rb"\s*(?i:<!doctype html|<html)", "is a web page",
        f"the download needs a login or another address: {_FETCH}"),
        (rb"\s*(<\?xml|<Error>)", "is an answer in XML", f"the download was refused: {_FETCH}"),
        (rb"PK\x03\x04.{26,160}?/(data\.pkl|\.format_version|byteorder|version)",
        "is a pickle of PyTorch", _NO_PICKLES),
        (rb"PK(\x03\x04|\x05\x06)", "is a zip archive", _ARCHIVE),
        (rb"\x80[\x02-\x05]", "is a pickle", _NO_PICKLES),
        (rb"\x1f\x8b|BZh|\xfd7zXZ|7z\xbc\xaf|Rar!|\x28\xb5\x2f\xfd|.{257}ustar", "is an archive",
        _ARCHIVE),
        (rb"\x93NUMPY", "is an array of NumPy", _SAFE),
        (rb"\x89HDF", "is an HDF5 file", _SAFE),
        (rb"\x89PNG|\xff\xd8\xff|GIF8|BM.{4}\0{4}|RIFF.{4}WEBP|II\*\0|MM\0\*|.{4}ftyp(hei|mif1|avi[fs])",
        "is an image", ""),
        (rb".{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI", "is a video", ""),
        (rb"\0{64}", "contains zeros from its first byte on",
        f"the download has not ended, or the disk failed; {_FETCH}"),
    )
)  # fmt: skip

_UNFINISHED = (".part", ".partial", ".crdownload", ".download", ".incomplete", ".aria2", ".!qb")
"""Endings of files that a browser or a download program is still writing."""

_LONGEST_ANSWER = 200
"""Largest number of bytes of a message that a server sent in place of a file."""


def mark_of(head: bytes, name: str = "", *, size: int | None = None) -> str:
    """What a file is, by its first bytes, and what to do about it: the end of a sentence that
    begins with its path.

    Args:
        head: Its first bytes, `HEAD_BYTES` or fewer.
        size: Its size in bytes, if known.

    Returns:
        `is a GGUF file; …`; empty if nothing is known about it.
    """
    if name.lower().endswith(_UNFINISHED):
        return f"is a download that has not ended; wait for it, or {_FETCH}"
    if not head:
        return f"is empty; {_FETCH}"
    for pattern, description, remedy in _MARKS:
        if pattern.match(head):
            return f"{description}; {remedy}" if remedy else description
    if is_safetensors(head):
        return "is a safetensors file"
    if size is not None and size <= _LONGEST_ANSWER and (text := _line_of(head)):
        return f"contains only the text {text!r}; {_FETCH}"
    return ""


def is_other_weights(path: Path) -> bool:
    """Whether a file has the ending of weights in another format, or of a download that has not
    ended."""
    return path.name.lower().endswith((*_UNFINISHED, ".gguf", ".onnx", ".h5", ".npz", ".msgpack"))


def is_archive(head: bytes) -> bool:
    """Whether a file begins like a zip, tar or other archive."""
    return mark_of(head).endswith(_ARCHIVE)


def is_safetensors(head: bytes) -> bool:
    """Whether a file begins like one of safetensors: the size of a header, and a brace."""
    return len(head) > 8 and head[8:9] == b"{" and head[7:8] == b"\0" == head[6:7]


def _line_of(head: bytes) -> str:
    """A file's content, if it is one line of text; else empty."""
    try:
        text = head.decode().strip()
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() else ""


_SCRIPT = re.compile(
    r"(accelerate|python3?|torchrun|uv|deepspeed|export|source) |[\w./-]+\.(py|sh|bat)\b"
)
_YAML = re.compile(r"""---|%YAML|["']?[\w -]+["']?:(\s|$)|- """)


def foreign_run_file(text: str) -> str:
    """What a text is that was given as a run file and is not TOML, as the end of a sentence; empty
    if nothing is known about it."""
    first = next(
        (
            line
            for line in map(str.strip, text.splitlines())
            if line and not line.startswith(("#", "//"))
        ),
        "",
    )
    if text.startswith("#!") or _SCRIPT.match(first):
        return "is a script"
    if first.startswith("{"):
        return "is JSON, as OneTrainer and SimpleTuner have it"
    return "is YAML, as ai-toolkit has it" if _YAML.match(first) else ""
