"""Headers of safetensors files of unknown origin: what the format forbids is refused in one line,
before anything is allocated."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ditkit_core.errors import UserError, printable
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.testing.denied import denied


def write(path: Path, header: dict[str, Any] | bytes, num_bytes: int = 16) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(num_bytes))
    return path


def tensor(first: Any, end: Any, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}


SOUND = {"a": tensor(0, 8, [2]), "b": tensor(8, 16, [1, 2])}
BAD: dict[str, dict[str, Any] | bytes] = {
    "offsets as floats": {**SOUND, "a": tensor(0.0, 8.0, [2])},
    "offsets as truths": {"a": tensor(False, 16, [4])},
    "offsets as texts": {**SOUND, "a": tensor("0", "8", [2])},
    "an offset of infinity": {"a": tensor(0, float("inf"), [4])},
    "an offset of 400 digits": {"a": tensor(0, 10**400, [4])},
    "one offset": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}},
    "three offsets": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}},
    "a shape of floats": {"a": tensor(0, 16, [4.0])},
    "a shape of a truth": {"a": tensor(0, 16, [True, 4])},
    "a shape that is a text": {"a": tensor(0, 16, "4")},
    "a shape that overflows to nothing": {"a": tensor(0, 16, [4]), "b": tensor(16, 16, [2**40,
    2**40])},
    "a shape of nothing that overflows": {"a": tensor(0, 16, [4]), "b": tensor(16, 16, [0, 2**62,
    2**62])},
    "a shape of 65 dimensions": {"a": tensor(0, 16, [4] + [1] * 64)},
    "a negative shape": {"a": tensor(0, 16, [-2, -2])},
    "overlapping": {"a": tensor(0, 16, [4]), "b": tensor(8, 16, [2])},
    "one inside another": {"a": tensor(0, 16, [4]), "b": tensor(4, 8, [1])},
    "a gap": {"a": tensor(0, 4, [1]), "b": tensor(8, 16, [2])},
    "a gap before the first": {"a": tensor(8, 16, [2])},
    "ends before it starts": {"a": tensor(16, 0, [4])},
    "an unknown dtype": {"a": tensor(0, 16, [4], "F31")},
    "a dtype that is a list": {"a": tensor(0, 16, [4], ["F32"])},
    "no tensor": {"a": 3},
    "half of a character in a name": {"\ud800": tensor(0, 16, [4])},
    "half of a character in the metadata": {"a": tensor(0, 16, [4]),
    "__metadata__": {"x": "\udfff"}},
    "metadata of numbers": {"a": tensor(0, 16, [4]), "__metadata__": {"x": 3}},
    "metadata that is a list": {"a": tensor(0, 16, [4]), "__metadata__": ["x"]},
    "a name twice": b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
    "nested deeply": b"[" * 200_000,
    "nested deeply inside": b'{"a": ' + b"[" * 200_000,
    "a list": b"[1]",
    "in UTF-16": json.dumps({"a": tensor(0, 16, [4])}).encode("utf-16"),
}  # fmt: skip
ACCEPTED_ELSEWHERE = {
    "a name twice",
    "a shape of 65 dimensions",
    "a shape of nothing that overflows",
}
"""What the library takes: of two entries it keeps the last, and shapes are only looked at when
torch is asked."""


@pytest.mark.parametrize("name", BAD)
def test_what_the_format_forbids_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.safetensors", BAD[name])
    with pytest.raises(UserError, match=r"x\.safetensors.*; fetch it again") as error:
        SafetensorsSource.open(path)
    assert printable(str(error.value)) == str(error.value)
    if name not in ACCEPTED_ELSEWHERE:
        with (
            pytest.raises((SafetensorError, RuntimeError, ValueError)),
            safe_open(path, "pt") as file,
        ):
            file.keys()


def test_a_dtype_that_is_not_read_is_no_damage(tmp_path: Path) -> None:
    header = {"a": tensor(0, 16, [4]), "scale": tensor(16, 20, [4], "F6_E2M3")}
    path = write(tmp_path / "x.safetensors", header, 20)
    with pytest.raises(
        UserError,
        match="has tensors of dtype F6_E2M3, which ditkit does not read; get the weights in bf16",
    ):
        SafetensorsSource.open(path)


def test_what_the_format_allows_is_read(tmp_path: Path) -> None:
    header = {
        "b": tensor(8, 16, [2]),
        "none": tensor(8, 8, [0, 5]),
        "a": tensor(0, 8, [1, 2]),
        "__metadata__": None,
    }
    source = SafetensorsSource.open(write(tmp_path / "x.safetensors", header))
    assert {name: source.read(name).shape for name in source.tensors} == {
        "b": (2,),
        "none": (0, 5),
        "a": (1, 2),
    }
    assert source.metadata == {} and source.fingerprint()


@pytest.mark.parametrize("which", ["file", "folder", "shard"])
def test_weights_without_permission_are_said_as_such(tmp_path: Path, which: str) -> None:
    folder = tmp_path / "transformer"
    folder.mkdir()
    file = folder / "x.safetensors"
    save_file({"a": torch.zeros(2)}, file)
    source = SafetensorsSource.open(folder)
    with denied(folder if which == "folder" else file):
        with pytest.raises(UserError, match=r"transformer.* cannot be read .Permission denied"):
            SafetensorsSource.open(file if which == "file" else folder)
        for use in (source.fingerprint, lambda: source.read("a")):
            with pytest.raises(UserError, match=r"transformer.* cannot be read .Permission denied"):
                use()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    for path in (tmp_path, tmp_path / "x.safetensors"):
        with pytest.raises(UserError, match="is not a regular file"):
            SafetensorsSource.open(path)


@pytest.mark.parametrize(
    ("name", "content", "answer"),
    [
        ("v.safetensors", b"GGUF\x03\0\0\0" + bytes(64), "is a GGUF file; its quantized blocks are not read; get the same model as .safetensors"),
        ("v.gguf", b"GGUF\x03\0\0\0" + bytes(64), "is a GGUF file; its quantized blocks are not read; get the same model as .safetensors"),
        ("v.safetensors", b"version https://git-lfs.github.com/spec/v1\noid", "is a pointer of Git LFS, three lines of text in place of the file; run `git lfs pull`"),
        ("v.safetensors", b"<!DOCTYPE html>" + bytes(99), "is a web page; the download needs a login or another address"),
        ("v.safetensors", b"PK\x03\x04" + b"x" * 26 + b"archive/data.pkl", "is a pickle of PyTorch; reading one runs the code in it"),
        ("v.safetensors", b"Entry not found", "contains only the text 'Entry not found'; fetch it again"),
        ("v.safetensors", bytes(4096), "contains zeros from its first byte on; the download has not ended"),
        ("v.safetensors", b"", "is empty; fetch it again"),
        ("v.safetensors.part", b"\xff" * 64, "is a download that has not ended; wait for it"),
        ("v.safetensors", b"\x40\0\0\0\0\0\0\0{", "is not a safetensors file, or is truncated in its header; fetch it again"),
    ],
)  # fmt: skip
def test_a_file_that_is_something_else_is_called_by_its_name(
    tmp_path: Path, name: str, content: bytes, answer: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        SafetensorsSource.open(path)
    assert str(error.value).startswith(f"{path} {answer}") and "\n" not in str(error.value)
    if name != "v.safetensors":
        with pytest.raises(UserError) as error:
            SafetensorsSource.open(tmp_path)
        assert str(error.value).startswith(
            f"{tmp_path} contains no .safetensors file; {name} {answer}"
        )


def test_a_header_of_too_many_tensors_ends_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = b'"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    path = write(
        tmp_path / "many.safetensors",
        b"{" + b",".join(entry % i for i in range(120_000)) + b"}",
        0,
    )
    monkeypatch.setattr(
        "ditkit_core.io.safetensors.parse_json_object", lambda *given: pytest.fail("parsed")
    )
    with pytest.raises(
        UserError,
        match="has 120000 tensors in its header, and files of models have at most 100000",
    ):
        SafetensorsSource.open(path)
