"""Checks that a family's demo is the real path on generated inputs: from files to an adapter that
diffusers loads."""

import json
import re
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from ditkit_core.commands import cli
from ditkit_core.config.resolve import resolve
from ditkit_core.diagnostics.doctor.dataset import examine_dataset
from ditkit_core.models.spec import ModelSpec
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.demo import LEVERS, Demo, check_loss


class DemoConformance:
    """Inherit, set what has no value here, and have a fixture `demo` of the module:
    `Demo.write(spec, folder)`."""

    spec: ClassVar[ModelSpec]
    samples: ClassVar[str] = "*.png"
    """Pattern of the files that a run generates."""
    num_samples: ClassVar[range]
    """How many of them the whole demo may leave."""
    trained: ClassVar[str]
    """A tensor of the adapter's file."""
    trained_names: ClassVar[str]
    """A pattern for how the names of all its tensors begin."""
    daily: ClassVar[slice] = slice(0, 1)
    """Which of `LEVERS` every change runs here; another family has the rest."""
    default: ClassVar[slice] = slice(0)
    """Which of these are in the default set."""
    levers: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Flags that this family alone takes."""
    forms: ClassVar[tuple[str, ...]] = ("--export.forms", '["official", "diffusers"]')
    """Flags that export an adapter in every form."""
    init_from: ClassVar[str] = "first_diffusers.safetensors"
    """The file of these from which another run starts."""
    merge_from: ClassVar[str] = "first.safetensors"
    """The one that a third run merges into its base."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Flags that a subclass says."""
        if "flags" in metafunc.fixturenames:
            daily = [*LEVERS[self.daily], *self.levers]
            cases = [
                flags if flags in daily[self.default] else pytest.param(flags, marks=mark)
                for mark, group in (
                    (pytest.mark.slow, daily),
                    (pytest.mark.exhaustive, [flags for flags in LEVERS if flags not in daily]),
                )
                for flags in group
            ]
            metafunc.parametrize("flags", cases)

    def test_the_demo_ends_with_a_verified_adapter_samples_and_metrics(
        self, demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tensors = demo.check_run(
            tmp_path / "run", lambda: capsys.readouterr().out, samples=self.samples
        )
        assert self.trained in tensors
        assert all(re.match(self.trained_names, name) for name in tensors)

    def test_the_demo_takes_every_lever(
        self, demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
    ) -> None:
        unsampled = ("--sample.captions", "0")
        assert demo.train(tmp_path / "run", *flags, *unsampled) == 0, capsys.readouterr().err
        assert list((tmp_path / "run" / "exports").iterdir())

    def test_a_preset_of_a_model_that_the_demo_does_not_write_is_refused_before_anything_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for command, preset in product(
            ("train", "encode", "sample"), self.spec.architecture.presets
        ):
            flags = ["--demo", "--run.folder", str(tmp_path / "run"), "--model.preset", preset]
            assert cli.run(self.spec, command, flags) == 1
            refused = capsys.readouterr().err
            assert (
                f"of its own, which is no {preset}: leave out" in refused
                and refused.count("\n") == 1
            )
        assert not (tmp_path / "run").exists()

    def test_the_demos_data_pass_their_own_doctor(self, demo: Demo) -> None:
        folder = {"run.folder": str(demo.inputs.parent)}
        config = resolve(RunConfig, demo=self.spec.demo.config, flags=folder)
        checkup = examine_dataset(create_run(self.spec, config, fetch=True).data).checkup
        assert checkup.trainable and not checkup.findings, checkup.findings

    @pytest.mark.slow
    def test_the_demo_is_trained_under_masks(
        self, demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A mask for each image or a video for each clip, white in one half, which the two steps
        and the held-out loss are weighed by."""
        masks = demo.write_masks(tmp_path / "masks")
        assert demo.train(tmp_path / "run", "--sample.captions", "0") == 0
        capsys.readouterr()
        masked = (
            "--data.masks",
            str(masks),
            "--train.mask_weight",
            "0.1",
            "--sample.captions",
            "0",
        )
        assert demo.train(tmp_path / "masked", *masked) == 0
        assert "train.mask_weight = 0.1 outside" in capsys.readouterr().out
        plain, weighed = demo.held_out(tmp_path / "run")[0], demo.held_out(tmp_path / "masked")[0]
        assert 0.1 * plain < weighed < plain
        assert (
            "with loss masks (weight 0.1 outside)"
            in (tmp_path / "masked" / "report.html").read_text()
        )
        assert demo.train(tmp_path / "masked", *masked, "--plan", "--json") in (0, 3)
        assert " with loss masks" in json.loads(capsys.readouterr().out)["bucket"]

    @pytest.mark.slow
    def test_an_adapter_trained_here_starts_and_merges_into_another_run(
        self, demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert demo.train(tmp_path / "first", *self.forms) == 0
        first, second = (tmp_path / run / "exports" for run in ("first", "second"))
        init, merge = first / self.init_from, first / self.merge_from
        assert (
            demo.train(
                tmp_path / "second", "--adapter.init", str(init), "--train.steps", "0", *self.forms
            )
            == 0
        )
        for file in {init, merge}:
            again = load_file(second / file.name.replace("first", "second"))
            assert all(torch.equal(tensor, again[name]) for name, tensor in load_file(file).items())
        assert demo.train(tmp_path / "third", "--base.merge", f'["{merge.as_posix()}@0.5"]') == 0
        assert "at strength 0.5" in capsys.readouterr().out

    @pytest.mark.slow
    def test_a_dora_is_trained_next_to_an_assistant_and_verified_for_the_bare_base(
        self, demo: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Checked, planned, trained, sampled with an adapter of its own, and continued; by
        diffusers' own loader and model."""
        assert demo.train(tmp_path / "first", *self.forms, "--sample.captions", "0") == 0
        file = (tmp_path / "first" / "exports" / self.merge_from).as_posix()
        files = ("--base.assistant", f"{file}@0.5", "--sample.adapter", f'["{file}"]')
        flags = (
            *files,
            "--adapter.use_dora",
            "true",
            "--prior.match_base",
            "0.5",
            "--adapter.targets",
            "[]",
        )
        run = tmp_path / "run"
        for mode in ("--check", "--plan"):  # the first writes the demo, the second writes nothing
            assert demo.train(run, *flags, mode) == 0, capsys.readouterr()
        capsys.readouterr()
        for more in ((), ("--train.steps", "3")):
            assert demo.train(run, *flags, *more) == 0, capsys.readouterr().err
            assert "verified: diffusers loads run_diffusers.safetensors" in capsys.readouterr().out
        page = (run / "report.html").read_text(encoding="utf-8")
        assert "in training alone, as an assistant" in page and "in samples alone" in page
        assert "50% of the steps match" in page and " verified" in page

    @pytest.mark.exhaustive  # `.ci/run` measures what a whole demo teaches, and its loss
    def test_the_whole_demo_lowers_the_held_out_loss_by_a_fifth(self, tmp_path: Path) -> None:
        check_loss(self.spec, tmp_path)
        assert len(list((tmp_path / "samples").glob(self.samples))) in self.num_samples
