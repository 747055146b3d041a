"""Every run file that the package ships is read, accepted and planned, and says what is so."""

import re
from pathlib import Path

import pytest

from ditkit_core.adapters.files.export import check_export
from ditkit_core.config.resolve import resolve
from ditkit_core.run.checks import check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.run_files import check_hub_ids, check_planned, check_schema
from ditkit_wan.presets import PRESETS
from ditkit_wan.spec import WAN

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
# One file of each kind of architecture, the smallest: planning traces a block of every kind, which
# takes most of a minute.
PLANNED = (
    "t2v_1.3b_lora", "t2v_1.3b_full", "i2v_14b_480p_lora", "flf2v_14b_lora", "ti2v_5b_lora",
    "t2v_a14b_lora", "i2v_a14b_lora",
    "vace_1.3b_lora", "fun_v1.1_control_1.3b_lora", "fun_v1.1_control_camera_1.3b_lora",
    "wantodance_14b_lora",
    "fun_v1.1_inp_1.3b_lora", "fun_inp_5b_lora", "fun_control_5b_lora",
    "fun_control_camera_5b_lora", "fun_inp_a14b_lora", "fun_control_a14b_lora",
    "fun_control_camera_a14b_lora", "vace_fun_a14b_lora", "s2v_14b_lora", "animate_14b_lora",
)  # fmt: skip


def run_of(file):
    return create_run(WAN, resolve(RunConfig, file=file))


def comments(file):
    return "\n".join(
        line.partition("#")[2] for line in file.read_text().splitlines() if "#" in line
    )


def kind(preset):
    """What an architecture is, its size apart."""
    arch = PRESETS[preset]
    return (
        arch.in_channels, arch.image_dim, arch.image_positions, bool(arch.boundary),
        bool(arch.vace_layers), arch.ref_conv,
        arch.camera_channels, arch.music is not None, arch.speech is not None,
        arch.animate is not None, arch.token_times, arch.fun,
    )  # fmt: skip


def test_there_are_run_files_for_every_preset():
    assert {resolve(RunConfig, file=file).model.preset for file in CONFIGS} == set(
        WAN.architecture.presets
    )


@pytest.mark.parametrize("file", [*CONFIGS, WAN.demo.config], ids=lambda file: file.stem)
def test_a_run_file_is_accepted(file):
    run = run_of(file)
    config, spec = run.config, run.spec
    assert config.model.preset in (*WAN.architecture.presets, "")
    assert (
        config.data.frames % spec.data.frame_step == 1 and config.data.frames <= spec.data.size[0]
    )
    assert config.data.height % spec.data.size_step == config.data.width % spec.data.size_step == 0
    check_export(spec, config.export, config.adapter)
    check_training(run, here=False)
    assert config.ema.decay > 0 or config.adapter.method != "full"


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_run_file_has_what_its_variant_is_trained_with(file):
    run = run_of(file)
    config = run.config
    assert config.data.fps in (0, run.spec.data.fps), "the model's own rate"
    size = {config.data.height, config.data.width}
    trained = re.search(r"(480|720)p$", config.model.preset)
    if trained or config.model.preset == "ti2v-5b":
        assert size == {"480p": {480, 832}, "720p": {720, 1280}}.get(
            trained[0] if trained else "", set(run.spec.data.size[1:])
        )
    else:
        assert size in ({480, 832}, set(run.spec.data.size[1:]))
    assert ("[experts]" in file.read_text()) == bool(run.experts)
    assert config.experts.train == "both" or not run.experts
    assert config.train.control_dropout == run.spec.training.control_dropout


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_the_comments_of_a_run_file_are_true(file):
    run, said = run_of(file), comments(file)
    for name in re.findall(r"wan-train (\S+)", said):
        assert name == file.name
    for page in re.findall(r"docs/\S+\.md", said):
        assert (ROOT / page).is_file(), page
    columns = {column.name: column for column in run.auxiliary.columns}
    named = {
        word
        for line in said.splitlines()
        if re.search(r"[Cc]olumns? ", line)
        for word in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", line)
    }
    assert named <= columns.keys(), "each is a column of this model"
    assert {name for name, column in columns.items() if column.required} <= named, (
        "what no clip may lack is named"
    )
    assert ("both experts" in said) == bool(run.experts)


def test_every_kind_of_architecture_is_planned_once():
    presets = [
        resolve(RunConfig, file=file).model.preset for file in CONFIGS if file.stem in PLANNED
    ]
    assert {kind(preset) for preset in presets} == {kind(preset) for preset in PRESETS}
    assert len(presets) == len(PLANNED) == len({kind(preset) for preset in presets}) + 1, (
        "and one is trained in full, too"
    )


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            marks=pytest.mark.slow if file.stem == "t2v_1.3b_lora" else pytest.mark.exhaustive,
            id=file.stem,
        )
        for file in CONFIGS
        if file.stem in PLANNED
    ],
)
def test_a_run_file_can_be_planned_as_it_stands(file):
    check_planned(WAN, file, most_bytes=2.2)


def test_the_schema_next_to_the_run_files_is_todays_and_they_conform():
    check_schema("ditkit_wan", CONFIGS[0].parent)


def test_a_published_model_is_known_by_its_hub_id(monkeypatch):
    monkeypatch.chdir(CONFIGS[0].parent)
    check_hub_ids(WAN, [file for file in CONFIGS if "models/" not in file.read_text()])
