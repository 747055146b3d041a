"""Every run file that the package ships is read, accepted and planned."""

from pathlib import Path

import pytest

from ditkit_core.config import RunConfig
from ditkit_core.config_layers import resolve
from ditkit_core.export import check_export
from ditkit_core.testing.run_files import check_planned
from ditkit_wan.spec import WAN

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


def test_there_are_run_files_for_every_preset():
    assert {resolve(RunConfig, file=file).model.preset for file in CONFIGS} == set(WAN.presets)


@pytest.mark.parametrize("file", [*CONFIGS, WAN.demo_config], ids=lambda file: file.stem)
def test_a_run_file_is_accepted(file):
    config = resolve(RunConfig, file=file)
    assert config.model.preset in (*WAN.presets, "")
    assert config.data.frames % WAN.frame_step == 1
    assert config.data.height % WAN.size_step == config.data.width % WAN.size_step == 0
    check_export(WAN, config.export, config.adapter)
    assert config.ema.decay > 0 or config.adapter.method != "full"


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[] if file.stem == "t2v_1.3b_lora" else pytest.mark.slow, id=file.stem)
        for file in CONFIGS
    ],
)
def test_a_run_file_can_be_planned_as_it_stands(file):
    check_planned(WAN, file, most_bytes=2.2)
