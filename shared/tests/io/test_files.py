"""Reading files of unknown origin: one line, whatever they contain."""

import os
from pathlib import Path

import pytest

from ditkit_core.errors import UserError
from ditkit_core.io.files import parse_json_object, read_json_object, read_text, write_text
from ditkit_core.testing.denied import denied


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not readable JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' appears twice"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1', "not readable JSON"),
        ('{"a": "é"}'.encode("latin-1"), "not readable JSON"),
        ('{"a": 1}'.encode("utf-16"), "not readable JSON"),
        (b"", "is empty"),
        (b"\n<!doctype html><html>", "is a web page"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 5\n",
            "is a pointer of Git LFS, three lines of text",
        ),
        (b"GGUF\x03\0\0\0", "is a GGUF file"),
    ],
    ids=lambda value: str(value[:12]),
)
def test_any_other_json_than_an_object_is_one_line(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(
        UserError, match=f"config.json.*{said}.*(fetch it again|get the same model)"
    ) as error:
        read_json_object(path)
    assert len(str(error.value)) < 1000
    with pytest.raises(UserError, match=f"the header .*{said}.*; write it again"):
        parse_json_object(content, "the header", "write it again")


def test_what_cannot_be_read_is_said_as_such(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(
        UserError, match="config.json cannot be read .No such file or directory.; check the path"
    ):
        read_json_object(path)
    path.write_text("{}")
    with (
        denied(path),
        pytest.raises(
            UserError, match="config.json cannot be read .Permission denied.; correct its perm"
        ),
    ):
        read_json_object(path)
    assert read_json_object(path) == {}
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(
        UserError, match="config.json is not a file of at most 256 MiB; fetch it again"
    ):
        read_json_object(path)


def test_a_file_without_an_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="not a file of at most"):
        read_json_object(path)
    path.unlink()
    with open(path, "wb") as file:
        file.truncate(2**40)  # sparse: it takes no space
    with pytest.raises(UserError, match="not a file of at most"):
        read_json_object(path)


def test_a_file_whose_name_has_as_many_bytes_as_a_name_may_have_is_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "é" * 127):
        write_text(tmp_path / name, "x")
    assert sorted(os.listdir(tmp_path)) == ["n" * 255, "é" * 127]


def test_a_byte_order_mark_stays_where_a_text_is_written_again(tmp_path):
    table = tmp_path / "metadata.csv"
    table.write_bytes(b"\xef\xbb\xbfimage,text\n")
    assert read_text(table) == "image,text\n"
    write_text(table, "image,text\na.png,c\u00e4t\n")
    assert table.read_bytes() == b"\xef\xbb\xbfimage,text\na.png,c\xc3\xa4t\n"
    write_text(tmp_path / "new.csv", "a")
    assert (tmp_path / "new.csv").read_bytes() == b"a"
