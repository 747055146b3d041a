"""Checks of the run files that a package ships."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ditkit_core.adapters.files.export import check_export
from ditkit_core.config.resolve import resolve
from ditkit_core.config.toml import read_toml
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.paths import is_hub_id, repository_of
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.run.checks import check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.plans.plan import make_report


class RunFileChecks:
    """Inherit, set `spec`, `folder` and `count`."""

    spec: ClassVar[ModelSpec]
    folder: ClassVar[Path]
    """Of the run files that the package ships."""
    count: ClassVar[int]
    """How many there are."""

    def check(self, config: RunConfig) -> None:
        """Check what else is so in a run file of the family."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """The run files, and the demo's."""
        if "file" in metafunc.fixturenames:
            files = [*sorted(self.folder.glob("*.toml")), self.spec.demo.config]
            metafunc.parametrize("file", files, ids=lambda file: file.stem)

    def test_a_run_file_is_accepted(self, file: Path) -> None:
        """Its adapter can be exported, and it trains."""
        config = resolve(RunConfig, file=file)
        check_export(self.spec, config.export, config.adapter)
        run = create_run(self.spec, replace(config, train=replace(config.train, threads=0)))
        check_training(run)
        self.check(config)

    def test_run_files_conform_to_the_schema_next_to_them(self) -> None:
        """Which is what the command prints."""
        assert len(list(self.folder.glob("*.toml"))) == self.count
        check_schema(self.spec.import_path.partition(".")[0], self.folder)


def check_hub_ids(spec: ModelSpec, files: Sequence[Path]) -> None:
    """Check that the preset of each run file is known by its hub id alone, and that every known hub
    id has a run file.

    Args:
        spec: The family.
        files: Its run files; those with a local path are left out.
    """
    models = [resolve(RunConfig, file=file).model for file in files]
    named = {
        repository_of(path): model
        for model in models
        if is_hub_id(path := model.transformer or model.base)
    }
    for model in named.values():
        assert arch_here(spec, replace(model, preset=""))[0] == model.preset, model
    assert named.keys() == spec.architecture.hub_presets.keys()


def check_planned(spec: ModelSpec, file: Path, *, most_bytes: float) -> None:
    """Plan an unchanged run file for a GPU of 80 GiB, and check the planned bytes of weights
    against the model's parameters.

    Args:
        spec: The family.
        file: The run file; it names a preset.
        most_bytes: To be stayed below: bytes of frozen weights for each number, those that stay in
            fp32 included.
    """
    config = resolve(RunConfig, file=file)
    report = make_report(create_run(spec, config), "80GiB")
    (device,) = report.devices
    model = build_on_meta(spec, spec.architecture.presets[config.model.preset], Precision())
    count = sum(parameter.numel() for parameter in model.parameters())
    purposes = device.purposes
    if config.adapter.method == "full":
        assert purposes["weights"] == 0 and purposes["adapters"] >= 4 * count, (purposes, count)
        assert purposes["average"] >= (4 * count if config.ema.decay else 0), (purposes, count)
    else:
        assert (
            2 * count <= purposes["weights"] < most_bytes * count
            and purposes["adapters"] < 0.2 * count
        ), (
            purposes,
            count,
        )
    assert report.fits, purposes
    assert (
        report.work.micro_batches == config.train.accumulation
        and config.model.preset in report.model
    ), report.model


def check_schema_of(file: Path) -> None:
    """Check that a run file points to a schema and conforms to it."""
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    schema = file.parent / first.removeprefix("#:schema ")
    assert faults(json.loads(schema.read_text(encoding="utf-8")), read_toml(file)) == [], file


def check_schema(package: str, folder: Path) -> None:
    """Check that the schema next to the shipped run files is what the command prints, and that
    every run file points to it and conforms.

    Args:
        package: The package's import name, such as `ditkit_wan`.
        folder: The folder of its run files.
    """
    file = folder / "schema.json"
    program = f"import sys; from {package}.cli import train; sys.argv = ['train', '--print-schema']; train()"
    printed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert printed == file.read_text(encoding="utf-8"), (
        f"{file} is stale: write it with --print-schema > {file.name}"
    )
    schema = json.loads(printed)
    for shipped in sorted(folder.glob("*.toml")):
        assert shipped.read_text(encoding="utf-8").startswith("#:schema ./schema.json\n"), shipped
        check_schema_of(shipped)
    assert faults(
        schema,
        {
            "trian": {},
            "train": {"stepz": 1, "steps": 1.5},
            "optim": {"betas": [0.9], "name": "adam"},
        },
    ) == [
        "trian",
        "train.stepz",
        "train.steps",
        "optim.betas",
        "optim.name",
    ]


def faults(schema: Any, value: Any, at: str = "") -> list[str]:
    """Dotted paths of what does not conform to a schema, as far as ours go."""
    if "anyOf" in schema:
        return [] if any(not faults(option, value) for option in schema["anyOf"]) else [at]
    if "enum" in schema:
        return [] if value in schema["enum"] else [at]
    kinds: dict[str, Any] = {"integer": int, "number": (int, float), "boolean": bool, "string": str}
    kinds |= {"array": list, "object": dict}
    if not isinstance(value, kinds[schema["type"]]) or (
        isinstance(value, bool) and schema["type"] != "boolean"
    ):
        return [at]
    if schema["type"] == "array":
        heads = schema.get("prefixItems", [schema["items"]] * len(value))
        wrong = len(heads) != len(value) or any(
            faults(kind, item) for kind, item in zip(heads, value, strict=True)
        )
        return [at] * wrong
    paths = []
    for key, item in value.items() if schema["type"] == "object" else ():
        path = f"{at}.{key}".lstrip(".")
        paths += (
            faults(schema["properties"][key], item, path) if key in schema["properties"] else [path]
        )
    return paths
