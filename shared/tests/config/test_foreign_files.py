"""Files that are recognised by their first bytes."""

import io
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from ditkit_core.config.foreign_files import HEAD_BYTES, is_safetensors, mark_of


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    memory = io.BytesIO()
    write(memory)
    return memory.getvalue()


def zipped(memory: io.BytesIO) -> None:
    with zipfile.ZipFile(memory, "w") as file:
        file.writestr("a.txt", "b" * 100)


def tarred(memory: io.BytesIO) -> None:
    with tarfile.open(fileobj=memory, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))


def picture(form: str) -> bytes:
    return written(lambda memory: Image.new("RGB", (64, 64)).save(memory, format=form))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"


@pytest.mark.parametrize(
    ("content", "start", "remedy"),
    [
        (b"GGUF\x03\0\0\0" + bytes(64), "is a GGUF file; ", "bf16 or fp8_scaled"),
        (
            POINTER,
            "is a pointer of Git LFS, three lines of text in place of the file; ",
            "git lfs pull",
        ),
        (b"\n<!doctype html>\n<html>", "is a web page; ", "hf download"),
        (b"<HTML lang=en>", "is a web page; ", "hf download"),
        (
            b'<?xml version="1.0"?><Error>AccessDenied</Error>',
            "is an answer in XML; ",
            "hf download",
        ),
        (
            written(lambda memory: torch.save({"a": torch.zeros(3)}, memory)),
            "is a pickle of PyTorch; ",
            ".safetensors",
        ),
        (
            written(
                lambda memory: torch.save({"a": 1}, memory, _use_new_zipfile_serialization=False)
            ),
            "is a pickle; ",
            ".safetensors",
        ),
        (written(zipped), "is a zip archive; ", "unpack"),
        (written(tarred), "is an archive; ", "unpack"),
        (b"\x1f\x8b\x08\0", "is an archive; ", "unpack"),
        (
            written(lambda memory: np.save(memory, np.zeros(3))),
            "is an array of NumPy; ",
            ".safetensors",
        ),
        (bytes(100), "contains zeros from its first byte on; ", "has not ended"),
        (b"", "is empty; ", "hf download"),
        (b"Entry not found", "contains only the text 'Entry not found'; ", "hf download"),
    ],
)
def test_a_file_is_recognised_and_the_answer_says_what_to_do(
    content: bytes, start: str, remedy: str
) -> None:
    said = mark_of(content[:HEAD_BYTES], "model.safetensors", size=len(content))
    assert said.startswith(start) and remedy in said and "\n" not in said


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_images_are_images(form: str) -> None:
    assert mark_of(picture(form)[:HEAD_BYTES]) == "is an image"


def test_an_unfinished_download_is_named_by_its_ending() -> None:
    assert mark_of(b"\x10\0", "model.safetensors.part").startswith(
        "is a download that has not ended; wait for it"
    )


def test_weights_and_ordinary_texts_have_no_wrong_mark() -> None:
    weights = save({"weight": torch.zeros(3)})
    assert is_safetensors(weights) and mark_of(weights[:HEAD_BYTES]) == "is a safetensors file"
    for text in (
        b"a photo of a cat\non a mat\n" * 20,
        b'{"file_name": "a.png"}',
        b"[train]\nsteps = 3\n" * 20,
        b"MZ",
    ):
        assert mark_of(text, size=1000) == "" and not is_safetensors(text)
