"""Every run file that the package ships is read, accepted and planned."""

from dataclasses import replace
from pathlib import Path

import pytest

from ditkit_core.adapters.files.export import check_export
from ditkit_core.config.resolve import resolve
from ditkit_core.run.checks import check_run, check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.run_files import check_hub_ids, check_planned, check_schema
from ditkit_flux2.spec import FLUX2

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def test_there_are_run_files_for_every_trained_family():
    assert {file.stem for file in CONFIGS} == {
        "dev_lora",
        "klein_4b_lora",
        "klein_9b_lora",
        "klein_base_4b_edit_lora",
        "klein_base_4b_full",
        "klein_base_4b_lora",
        "klein_base_9b_lora",
    }


@pytest.mark.parametrize("file", [*CONFIGS, FLUX2.demo.config], ids=lambda file: file.stem)
def test_a_run_file_is_accepted(file):
    config = resolve(RunConfig, file=file)
    assert config.model.preset in (*FLUX2.architecture.presets, "")
    assert not (
        config.model.preset
        and FLUX2.training.advice(FLUX2.architecture.presets[config.model.preset])
        and config.flow.target_guidance == 1
    ), "no distilled base whose guidance is unlearned"
    assert (
        config.data.height % FLUX2.data.size_step == config.data.width % FLUX2.data.size_step == 0
    )
    check_export(FLUX2, config.export, config.adapter)
    run = create_run(FLUX2, replace(config, train=replace(config.train, threads=0)))
    check_run(run)
    check_training(run)
    assert run.config.data.frames == 1


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_run_file_names_its_own_folder_and_the_base_of_its_preset(file):
    config = resolve(RunConfig, file=file)
    assert config.run.folder == f"runs/{file.stem.replace('_', '-')}"
    assert config.model.base.lower() == f"black-forest-labs/flux.2-{config.model.preset}"
    assert file.name in file.read_text(encoding="utf-8") or config.adapter.method == "full"


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, id=file.stem) for file in CONFIGS],
)
@pytest.mark.exhaustive  # each change plans a recipe for the same model
def test_a_run_file_can_be_planned_as_it_stands(file):
    check_planned(FLUX2, file, most_bytes=2.5)


def test_the_schema_next_to_the_run_files_is_todays_and_they_conform():
    check_schema("ditkit_flux2", CONFIGS[0].parent)


def test_a_published_model_is_known_by_its_hub_id(monkeypatch):
    monkeypatch.chdir(CONFIGS[0].parent)
    check_hub_ids(FLUX2, [file for file in CONFIGS if "models/" not in file.read_text()])
