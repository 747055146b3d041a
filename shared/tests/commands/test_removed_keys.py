"""Runs that an earlier version stored with a key that is gone."""

from pathlib import Path

import pytest
from toy_world import World, equal


def test_a_run_with_compiled_blocks_continues_and_says_so_where_they_were_set(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path, captions=0)
    assert world.train("plain", 4) == 0
    assert world.train("run", 1) == 0
    (file,) = tmp_path.rglob("run/config.toml")
    for steps, (stored, said) in enumerate((("false", 0), ("true", 1), ('"aot_eager"', 1)), 2):
        text = file.read_text(encoding="utf-8")
        file.write_text(
            text.replace("\nkernels =", f"\ncompile = {stored}\nkernels ="), encoding="utf-8"
        )
        capsys.readouterr()
        assert world.train("run", steps) == 0
        printed = "".join(capsys.readouterr())
        lines = [line for line in printed.splitlines() if "train.compile" in line]
        assert len(lines) == said and all(
            line.endswith(f"train.compile {stored} -> unset") for line in lines
        ), lines
        assert "\ncompile =" not in file.read_text(encoding="utf-8")
    assert equal(world.adapter("run"), world.adapter("plain"))
