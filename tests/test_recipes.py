"""Recipes are accepted, fit as their page says and train in miniature; the messages of the
troubleshooting page are the code's."""

import json
import math
import re
import shutil
from collections.abc import Collection
from contextlib import nullcontext
from functools import cache
from importlib.machinery import SourceFileLoader
from itertools import groupby
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from profiled_once import equal_steps_are_profiled_once  # noqa: F401 (a fixture)
from safetensors.torch import load_file

from ditkit_core.adapters.files.export import check_export
from ditkit_core.commands import cli
from ditkit_core.config.resolve import resolve
from ditkit_core.config.schema import config_values
from ditkit_core.config.toml import read_config_file
from ditkit_core.families.demo_motions import CLIPS
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.report import describe_shortfall
from ditkit_core.run.checks import check_settings, check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.jobs import jobs_of
from ditkit_core.run.plans.hours import PlannedRun, launch_of
from ditkit_core.run.plans.plan import make_report
from ditkit_core.run.recipes import GOALS
from ditkit_core.testing.pretend_devices import PretendDevices
from ditkit_core.testing.run_files import check_schema_of
from ditkit_core.testing.toy import TOY
from ditkit_wan.demo.write import write_checkpoint
from ditkit_wan.spec import WAN
from doc_recipes import ALL, COLUMNS, RECIPES, anchor, row
from doc_tables import TABLES
from marked import between
from workspace import MEMBERS, ROOT

FILES = {recipe.file: recipe for recipe in ALL}
PAGE = (RECIPES / "README.md").read_text(encoding="utf-8")
(TABLE,) = (table for table in TABLES if table.name == "recipes")
ROWS = {
    cells[3].partition("`")[2].partition("`")[0]: cells
    for line in between(PAGE, TABLE.markers, "README.md").splitlines()
    if line.startswith("| [") and (cells := line.strip("| ").split(" | "))
}
"""The table's cells by run file."""
EACH_CHANGE = ("klein_4b_full_12gb", "wan_14b_24gb_16gb", "wan_a14b_character_24gb")
"""Recipes that each change trains in miniature: a full fine-tune, two GPUs, two experts. The others
are trained at night."""
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [
    line
    for block in re.findall(r"```text\n(.+?)```", TROUBLES, flags=re.DOTALL)
    for line in block.splitlines()
]


def all_but(chosen: Collection[str]) -> list[Any]:
    """The recipes, as parameters of a test that each change runs for the chosen ones."""
    return [
        pytest.param(
            recipe, marks=pytest.mark.slow if name in chosen else pytest.mark.exhaustive, id=name
        )
        for name, recipe in FILES.items()
    ]


def test_the_page_has_a_row_and_a_section_for_each_run_file():
    files = {
        file.stem
        for one in ALL
        for file in one.recipe.path.parent.glob("*.toml")
        if file.stem != "index"
    }
    assert sorted(FILES) == sorted(files) and len(FILES) >= 20
    assert list(ROWS) == list(FILES)
    headings = re.findall("^## (.+)$", PAGE, flags=re.MULTILINE)
    for recipe in (one.recipe for one in ALL):
        assert recipe.section in headings
        goal = f"[{GOALS[recipe.goal]}](#{anchor(recipe.section)})"
        assert ROWS[recipe.name][:3] == [goal, recipe.model, recipe.machine]


def test_rows_are_in_the_order_of_goals_then_of_memory():
    goals = [goal for goal, _ in groupby(ALL, key=lambda one: one.recipe.goal)]
    assert len(goals) == len(set(goals))
    for _, rows in groupby(ALL, key=lambda one: one.recipe.goal):
        sizes = [parse_gpus(one.recipe.gpus)[0].total for one in rows]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.file)
def test_the_page_says_no_more_hours_than_a_recipe_promises(recipe):
    if recipe.recipe.processes > 1:
        assert 0 < float(ROWS[recipe.file][-1]) <= recipe.recipe.hours
        return
    cells = dict(zip(COLUMNS, ROWS[recipe.file][-len(COLUMNS) :], strict=True))
    fitting = {column: cell for column in COLUMNS if (cell := cells[column]) != "–"}
    assert list(fitting) == [column for column in COLUMNS if recipe.gpus_of(column) is not None]
    # The slowest comes first, as columns are in the order of speed.
    assert 0 < float(next(iter(fitting.values()))) <= recipe.recipe.hours


def test_who_wants_a_night_finds_it():
    recipes = [one.recipe for one in ALL]
    promised = {(recipe.goal, recipe.model, recipe.gpus): recipe.hours for recipe in recipes}
    assert (
        promised["character", "Wan 2.2 A14B", "24GiB"] <= 8
        and promised["motion", "Wan 2.2 A14B", "24GiB"] <= 10
    )
    for recipe in recipes:
        days = PAGE.partition(f"## {recipe.section}\n")[2].partition("\n## ")[0]
        assert recipe.hours <= 20 or "**These take" in days


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.file)
def test_a_recipe_is_accepted(recipe):
    run = create_run(recipe.spec, resolve(RunConfig, file=recipe.recipe.path))
    config = run.config
    assert config.model.preset in recipe.spec.architecture.presets
    check_export(recipe.spec, config.export, config.adapter)
    check_settings(run)
    check_training(run, here=False)  # the recipe's devices are not this machine's
    promise = recipe.recipe
    assert promise.processes in (1, len(parse_gpus(promise.gpus)))
    assert (promise.processes > 1) == bool(promise.link)
    assert (promise.processes > 1) == (max(config.ranks.shard, config.ranks.context) > 1)
    assert config.train.accumulation >= promise.processes
    assert config.run.folder == f"runs/{recipe.file.replace('_', '-')}"
    assert config.held_out.clips >= 4 and config.save.every_steps % config.held_out.every_steps == 0
    check_schema_of(recipe.recipe.path)


# A plan takes most of a minute of a CPU, so a change makes one, and a night all.
@pytest.mark.parametrize("recipe", all_but(["klein_4b_character_8gb"]))
def test_a_recipe_fits_its_machine_and_takes_the_hours_of_its_page(recipe):
    with recipe.run() as run:
        promise = recipe.recipe
        launch = launch_of(promise)
        report = make_report(run, promise.gpus, promise.host, launch)
        planned = PlannedRun.of(jobs_of(run), launch)
    assert report.fits, [describe_shortfall(row, report.previews) for row in report.lacking]
    gpus = parse_gpus(promise.gpus)
    assert planned.hours(gpus) <= promise.hours
    # The table's numbers are those of a plan.
    assert planned.division == report.step.partition and planned.host == report.step.streamed
    assert [device.peak for device in planned.devices(gpus)] == [
        device.peak for device in report.devices
    ]
    assert planned.seconds(gpus) * report.num_steps / 3600 == pytest.approx(report.hours)
    # Other versions hold other amounts.
    if f"--only recipes`, torch {torch.__version__.partition('+')[0]}," in PAGE:
        assert row(recipe).strip("| ").split(" | ") == ROWS[recipe.file]


def test_hours_count_everything_that_runs_the_model():
    """Without a profile: a step takes 3 s, a forward of validation 1 s, one of a sample 2 s."""

    class Timed(PlannedRun):
        def seconds(self, gpus):
            return 3.0

        def _forward(self, costs, gpus):
            return {"one": 1.0, "sample": 2.0}[costs]

    step = SimpleNamespace(job=SimpleNamespace(arch=WAN.architecture.presets["t2v-1.3b"]))
    flags = {
        "train.steps": 100,
        "held_out.clips": 4,
        "held_out.every_steps": 50,
        "sample.captions": 2,
        "sample.steps": 10,
    }

    def hours(spec: ModelSpec, **more: object) -> float:
        run = create_run(spec, resolve(RunConfig, flags=flags | more))
        return (
            Timed(
                jobs=jobs_of(run),
                step=step,
                profile=None,
                division=None,
                one="one",
                sample="sample",
            ).hours(())
            * 3600
        )

    wan = {"model.preset": "t2v-1.3b"}
    sampled = 2 * 10 * 2 * 2.0  # prompts, steps, calls with and without the prompt
    assert hours(WAN, **wan) == pytest.approx(300 + 3 * 4 * 5 * 1.0 + sampled)
    assert hours(WAN, **wan, **{"sample.every_steps": 25}) == pytest.approx(360 + 5 * sampled)
    assert hours(WAN, **wan, **{"sample.guidance": 1.0}) == pytest.approx(360 + sampled / 2)
    assert hours(WAN, **wan, **{"held_out.clips": 0, "sample.captions": 0}) == pytest.approx(300)
    experts = {"model.preset": "t2v-a14b", "experts.steps": [200, 100]}
    # 0.9 is no level of the second.
    assert hours(WAN, **experts) == pytest.approx(900 + 4 * (5 * 5 + 3 * 4) + sampled)


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_hours_of_a_small_run_are_those_of_its_plan():
    """The toy, which is profiled in a second: two samples in a step, a block streamed."""
    flags = {
        "model.preset": "tiny",
        "train.steps": 1000,
        "train.batch_size": 2,
        "train.swap_blocks": [1],
        "held_out.clips": 4,
        "held_out.every_steps": 100,
        "sample.steps": 1,
    }
    run = create_run(TOY, resolve(RunConfig, flags=flags))
    planned, report, gpus = (
        PlannedRun.of(jobs_of(run)),
        make_report(run, "8GiB"),
        parse_gpus("8GiB"),
    )
    assert planned.division == report.step.partition and planned.host == report.step.streamed > 0
    assert [device.peak for device in planned.devices(gpus)] == [
        device.peak for device in report.devices
    ]
    step, hours = planned.seconds(gpus), planned.hours(gpus)
    assert (
        step == pytest.approx(report.step.seconds)
        and 1000 * step / 3600 < hours < 1300 * step / 3600
    )


OF_THE_DEMO = (
    "model.base",
    "data.folder",
    "data.frames",
    "data.height",
    "data.width",
    "data.bucket_step",
)
"""Keys that a miniature of a recipe takes from the family's demo, as far as the demo sets them."""
FEW = {
    "model.preset": "",  # the checkpoint's own
    "data.references": "",  # the demo's images have some already
    "base.assistant": "",  # a file of the hub, for the real model
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
    """The settings that make a small run on the CPU of a recipe's: the demo's checkpoint and media,
    sizes, and steps. Levers stay."""
    spec.demo.write(folder / "inputs")
    demo = read_config_file(RunConfig, spec.demo.config)
    values = {key: demo[key] for key in OF_THE_DEMO if key in demo}
    values |= {
        key: each.replace("{run}", str(folder))
        for key, each in values.items()
        if isinstance(each, str)
    }
    # Of a model of videos that learns from photographs, and generates the demo's size.
    if config.data.frames == 1:
        values["data.frames"] = 1
    if config.data.resolutions:
        step, largest = spec.data.size_step, demo["data.height"]
        values["data.resolutions"] = [
            largest - step * index for index in range(len(config.data.resolutions))
        ]
        del values["data.height"], values["data.width"]
    if variant := VARIANTS.get(config.model.preset):
        shutil.rmtree(values["model.base"])
        write_checkpoint(Path(values["model.base"]), [clip.caption for clip in CLIPS], variant)
    few = FEW | {
        "run.folder": str(folder / "run"),
        "train.swap_blocks": [min(1, n) for n in config.train.swap_blocks],
    }
    if config.experts.steps:
        few["experts.steps"] = [few["train.steps"]]
    if config.sample.frames:
        few |= {"sample.frames": 5, "sample.height": 0, "sample.width": 0}
    if config.sample.every_steps:
        few["sample.every_steps"] = 1
    few["ranks.shard"] = 1
    if config.train.devices:
        few |= {"train.devices": ["cpu", "cpu:1"], "train.split_points": [1]}
    return values | few


@pytest.mark.parametrize("recipe", all_but(EACH_CHANGE))
def test_a_recipe_trains_in_miniature(recipe, tmp_path, capsys):
    spec, config = recipe.spec, resolve(RunConfig, file=recipe.recipe.path)
    small = miniature(config, spec, tmp_path)
    flags = [
        text
        for key, value in small.items()
        for text in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
    with PretendDevices() if config.train.devices else nullcontext():
        assert cli.run(spec, "train", [str(recipe.recipe.path), *flags]) == 0, (
            capsys.readouterr().err
        )

    run = tmp_path / "run"
    asked, used = config_values(config), config_values(resolve(RunConfig, stored=run))
    # A run stores what train.kernels = auto was.
    assert {key for key in used if used[key] != asked[key]} <= {*small, "train.kernels"}
    parts = sorted(run.glob("*_noise")) or [run]  # of two experts, or of one
    for part in parts:
        records = [
            json.loads(line)
            for line in (part / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert [math.isfinite(record["loss"]) for record in records if "loss" in record] == [
            True,
            True,
        ]
    assert list((run / "samples").iterdir())
    exports = [load_file(export) for export in (run / "exports").rglob("*.safetensors")]
    assert len(exports) >= len(parts)
    start = load_file(next((Path(small["model.base"]) / "transformer").glob("*.safetensors")))
    for tensors in exports:  # the second factor of a LoRA is zero before its first step
        names = [name for name in tensors if config.adapter.method == "full" or "lora_B" in name]
        before = {
            name: start[name].to(tensors[name].dtype) if name in start else torch.zeros(())
            for name in names
        }
        assert names and any((tensors[name] != before[name]).any() for name in names)


@cache
def literals() -> str:
    """All texts of the code; where a value goes into one, and between two, there is a line's end.

    Read off the compiled modules, which Python keeps: parsing them takes ten times as long.
    """
    found: list[str] = []
    left: list[Any] = [
        SourceFileLoader(file.stem, str(file)).get_code(file.stem)
        for member in MEMBERS
        for file in member.modules
    ]
    while left:
        constant = left.pop()
        if isinstance(constant, CodeType):
            left += constant.co_consts
        elif isinstance(constant, tuple | frozenset):
            left += constant
        elif isinstance(constant, str):
            found.append(constant)
    return "\n".join(found)


def clauses(message: str) -> list[str]:
    """What a message has between values, colons, semicolons and brackets."""
    return [
        part for each in re.split(r"…|[:;] | \(|\)", message) if (part := each.strip(" ,:;()."))
    ]


def test_the_page_has_messages():
    assert len(MESSAGES) > 15


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_troubleshooting_page_is_one_of_the_code(message):
    assert max(map(len, clauses(message))) >= 12
    assert [clause for clause in clauses(message) if clause not in literals()] == []


def test_a_message_that_no_code_prints_is_found():
    assert clauses("error: … is sad; cheer it up (…)") == ["error", "is sad", "cheer it up"]
    assert "cheer it up, please" not in literals()
