"""Recipes are accepted, fit as their page says and train in miniature; the messages of the troubleshooting page are the code's."""

import ast
import json
import math
import re
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ditkit_core.adapters.files.export import check_export
from ditkit_core.commands import cli
from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import config_values
from ditkit_core.config.toml import read_config_file
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.plan import make_report
from ditkit_core.planner.report import print_plan
from ditkit_core.run.checks import check_settings, check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.pretend_devices import PretendDevices
from ditkit_core.testing.run_files import check_schema_of
from ditkit_flux2.spec import FLUX2
from ditkit_wan.demo.media import CLIPS
from ditkit_wan.demo.write import write_checkpoint
from ditkit_wan.spec import WAN
from workspace import MEMBERS, ROOT

RECIPES = ROOT / "docs" / "recipes"
FILES = sorted(RECIPES.glob("*.toml"))
PAGE = (RECIPES / "README.md").read_text(encoding="utf-8")
EACH_CHANGE = ("klein_4b_full_12gb", "wan_14b_24gb_16gb", "wan_a14b_24gb")
"""Recipes that each change trains in miniature: a full fine-tune, two GPUs, two experts. The others are trained at night."""
SPECS = {FLUX2.name: FLUX2, WAN.name: WAN}
PLANS = {
    name: (family, gpus, host, excerpt.splitlines())
    for family, name, gpus, host, excerpt in re.findall(
        r"```console\n\$ uv run (\w+)-train docs/recipes/(\S+)\.toml --plan --gpus (\S+)(?: --host (\S+))?\n(.+?)\n```",
        PAGE,
        flags=re.DOTALL,
    )
}
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [
    line for block in re.findall(r"```text\n(.+?)```", TROUBLES, flags=re.DOTALL) for line in block.splitlines()
]


def test_the_page_has_a_plan_a_link_and_a_row_for_each_run_file():
    assert PLANS.keys() == {file.stem for file in FILES} and len(FILES) >= 9
    for file in FILES:
        assert PAGE.count(f"[`{file.name}`]({file.name})") == 1


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_accepted(file):
    spec = SPECS[PLANS[file.stem][0]]
    run = create_run(spec, resolve(RunConfig, file=file))
    config = run.config
    assert config.model.preset in spec.architecture.presets
    check_export(spec, config.export, config.adapter)
    check_settings(run)
    check_training(run, here=False)  # the recipe's devices are not this machine's
    assert config.run.folder == f"runs/{file.stem.replace('_', '-')}"
    assert config.held_out.clips >= 4 and config.save.every_steps % config.held_out.every_steps == 0
    check_schema_of(file)


# A plan takes most of a minute of a CPU, so a change makes one, and a night all.
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file, marks=pytest.mark.slow if file.stem == "klein_4b_12gb" else pytest.mark.exhaustive, id=file.stem
        )
        for file in FILES
    ],
)
def test_a_recipe_fits_as_its_page_says(file, capsys):
    family, gpus, host, shown = PLANS[file.stem]
    report = make_report(create_run(SPECS[family], resolve(RunConfig, file=file)), gpus, host)
    print_plan(report)
    assert report.fits
    printed = iter(capsys.readouterr().out.splitlines())
    if f", torch {torch.__version__.partition('+')[0]}." in PAGE:  # others hold other amounts
        assert len(shown) > 10 and [line for line in shown if line not in printed] == []


OF_THE_DEMO = ("model.base", "data.folder", "data.frames", "data.height", "data.width", "data.bucket_step")
"""Keys that a miniature of a recipe takes from the family's demo, as far as the demo sets them."""
FEW = {
    "model.preset": "",  # the checkpoint's own
    "train.steps": 2,
    "train.threads": 1,
    "save.every_steps": 1,
    "held_out.every_steps": 1,
    "sample.steps": 2,
    "sample.captions": 1,
    "log.tensorboard": False,
}
VARIANTS = {"ti2v-5b": "ti2v", "t2v-a14b": "t2v-a14b"}
"""Checkpoints that the demo does not write, by preset."""


def miniature(config: RunConfig, spec: ModelSpec, folder: Path) -> dict[str, Any]:
    """The settings that make a small run on the CPU of a recipe's: the demo's checkpoint and media, sizes, and steps. Levers stay."""
    spec.demo.write(folder / "inputs")
    demo = read_config_file(RunConfig, spec.demo.config)
    values = {key: demo[key] for key in OF_THE_DEMO if key in demo}
    values |= {key: each.replace("{run}", str(folder)) for key, each in values.items() if isinstance(each, str)}
    if variant := VARIANTS.get(config.model.preset):
        shutil.rmtree(values["model.base"])
        write_checkpoint(Path(values["model.base"]), [clip.caption for clip in CLIPS], variant)
    few = FEW | {"run.folder": str(folder / "run"), "train.swap_blocks": [min(1, n) for n in config.train.swap_blocks]}
    if config.sample.every_steps:
        few["sample.every_steps"] = 1
    if config.base.quantized_cache:
        few["base.quantized_cache"] = str(folder / "quantized")
    if config.train.devices:
        few |= {"train.devices": ["cpu", "cpu:1"], "train.split_points": [1]}
    return values | few


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.slow if file.stem in EACH_CHANGE else pytest.mark.exhaustive, id=file.stem)
        for file in FILES
    ],
)
def test_a_recipe_trains_in_miniature(file, tmp_path, capsys):
    spec, config = SPECS[PLANS[file.stem][0]], resolve(RunConfig, file=file)
    small = miniature(config, spec, tmp_path)
    flags = [
        text
        for key, value in small.items()
        for text in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
    with PretendDevices() if config.train.devices else nullcontext():
        assert cli.run(spec, "train", [str(file), *flags]) == 0, capsys.readouterr().err

    run = tmp_path / "run"
    asked, used = config_values(config), config_values(resolve(RunConfig, stored=run))
    # A run stores what train.kernels = auto was.
    assert {key for key in used if used[key] != asked[key]} <= {*small, "train.kernels"}
    parts = sorted(run.glob("*_noise")) or [run]  # of two experts, or of one
    for part in parts:
        records = [json.loads(line) for line in (part / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [math.isfinite(record["loss"]) for record in records if "loss" in record] == [True, True]
    assert list((run / "samples").iterdir())
    exports = [load_file(export) for export in (run / "exports").rglob("*.safetensors")]
    assert len(exports) >= len(parts)
    start = load_file(next((Path(small["model.base"]) / "transformer").glob("*.safetensors")))
    for tensors in exports:  # the second factor of a LoRA is zero before its first step
        names = [name for name in tensors if config.adapter.method == "full" or "lora_B" in name]
        before = {name: start[name].to(tensors[name].dtype) if name in start else torch.zeros(()) for name in names}
        assert names and any((tensors[name] != before[name]).any() for name in names)


@cache
def literals() -> str:
    """All texts of the code; where a value goes into one, and between two, there is a line's end."""
    found = []
    for file in (file for member in MEMBERS for file in member.modules):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def clauses(message: str) -> list[str]:
    """What a message has between values, colons, semicolons and brackets."""
    return [part for each in re.split(r"…|[:;] | \(|\)", message) if (part := each.strip(" ,:;()."))]


def test_the_page_has_messages():
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_troubleshooting_page_is_one_of_the_code(message):
    assert max(map(len, clauses(message))) >= 12
    assert [clause for clause in clauses(message) if clause not in literals()] == []


def test_a_message_that_no_code_prints_is_found():
    assert clauses("error: … is sad; cheer it up (…)") == ["error", "is sad", "cheer it up"]
    assert "cheer it up, please" not in literals()
