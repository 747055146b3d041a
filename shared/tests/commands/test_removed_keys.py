"""Runs that an earlier version stored with a key that is gone."""

from pathlib import Path

import pytest
from toy_world import World, equal

FLAGS = ("--sample.captions", "0")


@pytest.mark.parametrize(("stored", "said"), [("false", 0), ("true", 1), ('"aot_eager"', 1)])
def test_a_run_with_compiled_blocks_continues_and_says_so_where_they_were_set(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stored: str,
    said: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert world.train("plain", 2, *FLAGS) == 0
    assert world.train("run", 1, *FLAGS) == 0
    (file,) = tmp_path.rglob("run/config.toml")
    text = file.read_text(encoding="utf-8")
    file.write_text(
        text.replace("\nkernels =", f"\ncompile = {stored}\nkernels ="), encoding="utf-8"
    )
    capsys.readouterr()
    assert world.train("run", 2, *FLAGS) == 0
    printed = capsys.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if "train.compile" in line]
    assert len(lines) == said and all(
        line.endswith(f"train.compile {stored} -> unset") for line in lines
    ), lines
    assert "\ncompile =" not in file.read_text(encoding="utf-8")
    assert equal(world.adapter("run"), world.adapter("plain"))
