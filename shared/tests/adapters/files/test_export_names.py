"""The table of names in a run's exports: what is written under a name is found under it."""

import os
from itertools import product
from pathlib import Path

import pytest

from ditkit_core.adapters.files.export_names import (
    ExportName,
    copies_of_expert,
    exports_without_save,
    finished_adapters,
    remove_earlier,
    rename_adapters,
)
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.adapter_formats import ADAPTER_FORMS

EXPERTS = ("high_noise", "low_noise")
RUNS = ("run", "v1.5 (new)", "adapter", "run-step-000010", "run_diffusers", "run-export")


@pytest.mark.parametrize("run", RUNS)
def test_every_name_is_read_as_it_was_written(run: str) -> None:
    folder = RunFolder(Path(run))
    for expert, mark, step, form in product(
        ("", *EXPERTS), (False, True), (None, 0, 10, 1_000_000), ADAPTER_FORMS
    ):
        name = ExportName(run=run, expert=expert, by_command=mark, step=step, form=form)
        assert ExportName.parse(name.at(folder).name, (run,), EXPERTS) == name
        assert (ExportName.parse(name.at(folder).name, (run,)) is None) == bool(expert)
    for other in (
        "mine",
        "mine_diffusers",
        f"{run}-mine",
        f"{run}-step-x",
        f"{run}_",
        f"{run}_flux",
        f"my{run}",
    ):
        assert ExportName.parse(f"{other}.safetensors", (run,), EXPERTS) is None


def written(folder: RunFolder, *names: str) -> RunFolder:
    for name in names:
        (folder.exports / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.exports / name).touch()
    return folder


def test_the_name_of_earlier_versions_is_found_where_there_is_no_newer_file(tmp_path: Path) -> None:
    files = (
        "run.safetensors",
        "adapter.safetensors",
        "adapter_musubi.safetensors",
        "mine.safetensors",
    )
    folder = written(RunFolder(tmp_path / "run"), *files)
    assert [name.at(folder).name for name in finished_adapters(folder)] == [files[0], files[2]]
    whole = RunFolder(tmp_path / "whole")
    assert [copy.name for _, copy in copies_of_expert(folder, whole, "low_noise")] == [
        "whole_low_noise.safetensors",
        "adapter_low_noise_musubi.safetensors",
    ]
    remove_earlier(folder)
    assert sorted(os.listdir(folder.exports)) == ["mine.safetensors", "run.safetensors"]
    own = written(RunFolder(tmp_path / "adapter"), "adapter.safetensors")
    remove_earlier(own)
    assert [name.at(own).name for name in finished_adapters(own)] == ["adapter.safetensors"], (
        "the run's own name"
    )


def test_only_what_belongs_to_a_save_that_is_gone_is_stale(tmp_path: Path) -> None:
    stale = {"run-step-000010.safetensors", "adapter-step-000010_musubi.safetensors", "step-000010"}
    kept = (
        "run-step-000020.safetensors",
        "run-export-step-000010.safetensors",
        "mine-step-000010.safetensors",
    )
    folder = written(
        RunFolder(tmp_path / "run"),
        *kept,
        *stale - {"step-000010"},
        "step-000010/x",
        "step-000020/x",
    )
    folder.save(20).mkdir(parents=True)
    assert {path.name for path in exports_without_save(folder)} == stale


def test_a_renamed_run_renames_its_adapters_and_no_other_file(tmp_path: Path) -> None:
    others = {
        "old-mine.safetensors",
        "old-export-step-000010.safetensors",
        "old-step-000010.safetensors",
    }
    ours = ("old.safetensors", "old_low_noise_diffusers.safetensors", "old-step-000010.safetensors")
    folder = written(RunFolder(tmp_path / "new"), *others, *ours, "new-step-000010.safetensors")
    rename_adapters(folder, "old", EXPERTS)
    assert set(os.listdir(folder.exports)) == others | {name.replace("old", "new") for name in ours}
    rename_adapters(folder, "new", EXPERTS)
    assert set(os.listdir(folder.exports)) == others | {name.replace("old", "new") for name in ours}
