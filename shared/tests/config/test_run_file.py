"""Run files that are none: their numbers, their lines, and files of other kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ditkit_core.commands.options import TrainOptions
from ditkit_core.config.cli_args import read_flags
from ditkit_core.config.resolve import resolve
from ditkit_core.config.sizes import parse_size
from ditkit_core.encoding.cache import parse_rule
from ditkit_core.engine.ac_schedule import as_schedule
from ditkit_core.errors import UserError
from ditkit_core.planner.gpus import keeping_reserves, parse_gpus
from ditkit_core.run.config import RunConfig

KEYS = "sections such as [train] and keys such as steps = 1000 below them; --help names the keys that matter"


def refusal(act: Callable[[], Any]) -> str:
    """The message of the UserError that `act` must raise, which must be one line."""
    with pytest.raises(UserError) as raised:
        act()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def refused(file: Path, content: bytes) -> str:
    """The message about a run file with this content, without its path."""
    file.write_bytes(content)
    message = refusal(lambda: resolve(RunConfig, file=file))
    assert message.count(str(file)) == 1
    return message.replace(f"{file} ", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"job: extension\nconfig:\n  name: cats\n",
            f"is YAML, as ai-toolkit has it, and a run file is TOML: {KEYS}",
        ),
        (
            b"# cats\n---\nsteps: 3\n",
            f"is YAML, as ai-toolkit has it, and a run file is TOML: {KEYS}",
        ),
        (
            b'{"method": "LORA"}',
            f"is JSON, as OneTrainer and SimpleTuner have it, and a run file is TOML: {KEYS}",
        ),
        (b"#!/bin/bash\naccelerate launch x.py\n", f"is a script, and a run file is TOML: {KEYS}"),
        (
            b"accelerate launch wan_train_network.py --lr 1\n",
            f"is a script, and a run file is TOML: {KEYS}",
        ),
        (b"<!DOCTYPE html><html>", f"is a web page, and a run file is TOML: {KEYS}"),
        (b"GGUF\x03\0\0\0\xff\xff", "is a GGUF file; a run file is TOML, saved as UTF-8"),
        (b"\x40\0\0\0\0\0\0\0{\xff", "is a safetensors file; a run file is TOML, saved as UTF-8"),
        (b"\xffx", "is not UTF-8 text; a run file is TOML, saved as UTF-8"),
    ],
)
def test_a_file_that_is_no_run_file_is_named_by_its_kind(
    tmp_path: Path, content: bytes, message: str
) -> None:
    assert refused(tmp_path / "run.toml", content) == message


def test_of_a_file_of_any_size_no_more_is_read_than_a_run_file_has(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as sparse:
        sparse.write(b"\x40\0\0\0\0\0\0\0{\xff")
        sparse.truncate(2**36)
    assert "is a safetensors file" in refusal(lambda: resolve(RunConfig, file=file))


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ("folder = clips", "which is 'folder = clips'; write a text in quotes: folder = \"clips\""),
        ("buckets = True", "which is 'buckets = True'; write true or false in lower case"),
        ("frames = 5,", "which is 'frames = 5,'; leave the comma at the end out"),
        ("fps = .5", "which is 'fps = .5'; write digits on both sides of the point: 0.5"),
        ("frames = 05", "which is 'frames = 05'; write a number without zeros in front"),
        ("frames = None", "which is 'frames = None'; leave a key out that has no value"),
        ("frames: 5", "which is 'frames: 5'; write key = value; a colon is YAML"),
        ("frames == 5", "which is 'frames == 5'; write one ="),
        ("folder = “clips”", "which is 'folder = “clips”'; write straight quotes: \"text\""),
        ("folder", "which is 'folder'; write key = value"),
        ("--data.frames 5", "without dashes, in its section: [train] and below it steps = 5"),
        (
            'folder = "clips',
            "which is 'folder = \"clips'; a text ends with the quotes that it begins with",
        ),
        (
            "folders = ['a'\n'b']",
            "which is \"'b']\"; items are separated by commas, and the list ends with ]",
        ),
        ('folder = "C:\\Users"', "write the path in single quotes, or with forward slashes"),
    ],
)
def test_a_line_that_is_not_toml_is_quoted_with_the_remedy(
    tmp_path: Path, lines: str, end: str
) -> None:
    message = refused(tmp_path / "run.toml", f"[data]\n{lines}".encode())
    assert message.startswith("is not TOML: ") and message.endswith(end)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[data]\nfps = 3\n[train]\nsteps = 1\n[data]\n",
            "has the section [data] twice, in lines 1 and 5; put all keys below the first one",
        ),
        (
            "[data]\nfps = 3\nfps = 4",
            "has the key data.fps twice, in lines 2 and 3; leave one of the lines out",
        ),
    ],
)
def test_what_is_there_twice_is_named_with_both_lines(
    tmp_path: Path, text: str, message: str
) -> None:
    assert refused(tmp_path / "run.toml", text.encode()) == message


def test_a_section_next_to_its_dotted_keys_is_named_without_words_of_python(tmp_path: Path) -> None:
    message = refused(tmp_path / "run.toml", b"data.fps = 3\n[data]\nframes = 5")
    assert "Cannot declare [data] twice" in message and message.endswith(
        "put all keys of a section below its name"
    )


@pytest.mark.parametrize("digits", ["1" + "0" * 400, "9" * 4000, f"-{'9' * 400}", str(2**63)])
def test_a_number_that_nothing_can_store_is_refused_where_it_is_read(
    tmp_path: Path, digits: str
) -> None:
    file = tmp_path / "run.toml"
    for key, kind in (
        ("train.steps", "a whole number"),
        ("optim.lr", "a number"),
        ("train.threads", "a whole number"),
    ):
        if key == "optim.lr" and len(digits) < 309:
            continue  # as a float it is a number like others
        section, name = key.split(".")
        file.write_text(f"[{section}]\n{name} = {digits}")
        message = refusal(lambda: resolve(RunConfig, file=file))
        assert (
            message.startswith(f"{key} in {file} must be {kind}, not {digits[:40]}")
            and len(message) < 400
        )
        assert message.endswith("that number is too large")
        refusal(lambda key=key: read_flags([f"--{key}={digits}"], RunConfig, TrainOptions))
    file.write_text(f"[optim]\nbetas = [0.9, {digits.ljust(310, '0')}]")
    assert "optim.betas" in refusal(lambda: resolve(RunConfig, file=file))


def test_the_largest_numbers_are_read_and_a_list_holds_none_that_is_not_finite(
    tmp_path: Path,
) -> None:
    read = read_flags([f"--train.steps={2**63 - 1}", "--optim.lr=1e308"], RunConfig, TrainOptions)
    assert dict(read.values) == {"train.steps": 2**63 - 1, "optim.lr": 1e308}
    (tmp_path / "run.toml").write_text("[optim]\nbetas = [nan, 0.9]")
    message = refusal(lambda: resolve(RunConfig, file=tmp_path / "run.toml"))
    assert message.endswith("must be a list such as [1, 2], not [NaN, 0.9]")


@pytest.mark.parametrize(
    "argv",
    [
        ["--adapter.rank", str(2**62)],
        ["--adapter.rank_pattern", f"*={2**62}"],
        ["--adapter.rank_pattern", f"*={'9' * 400}"],
        ["--optim.lr_pattern", f"*={'9' * 400}"],
        ["--train.checkpointing", f"{'9' * 5000}=full"],
        ["--train.checkpointing", f"every_n({'9' * 5000})"],
        ["--train.reserve", "1e308"],
    ],
)
def test_numbers_inside_of_texts_end_in_one_line_too(argv: list[str]) -> None:
    def read() -> None:
        read = read_flags(argv, RunConfig, TrainOptions)
        config = resolve(RunConfig, flags=read.values)
        as_schedule(config.train.checkpointing).policies([torch.device("cpu")] * 4)
        keeping_reserves(parse_gpus("24GiB"), config.train.reserve)

    refusal(read)


@pytest.mark.parametrize("text", [f"{'9' * 400}GiB", f"{'9' * 5000}x24GiB"])
def test_sizes_of_hundreds_of_digits_are_no_sizes(text: str) -> None:
    refusal(lambda: parse_gpus(text))
    refusal(lambda: parse_size(text, "--host"))
    refusal(lambda: parse_rule(text.replace("GiB", "GB")))
