"""The process of its own that verifies exports next to a run on GPUs, with the demo's run of a real
model."""

import shutil
import time
from pathlib import Path

import pytest

from ditkit_core.config.resolve import resolve
from ditkit_core.diagnostics.verification.exported import read_results, unverified
from ditkit_core.diagnostics.verification.verifier import Verifier
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.testing.demo import Demo
from ditkit_wan.spec import WAN

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run whose exports were never verified; tests copy it."""
    folder = tmp_path_factory.mktemp("finished")
    demo, run = Demo.write(WAN, folder / "demo"), folder / "run"
    flags = (
        "--train.steps",
        "2",
        "--save.every_steps",
        "1",
        "--optim.lr",
        "0.01",
        "--sample.captions",
        "0",
    )
    assert demo.train(run, *flags, "--base.quantize", "int8", "--export.merged", "true") == 0
    RunFolder(run).verified.unlink()
    return run


@pytest.fixture
def trained(finished: Path, tmp_path: Path) -> tuple[RunContext, RunFolder]:
    path = shutil.copytree(finished, tmp_path / "run")
    return create_run(WAN, resolve(RunConfig, stored=path), fetch=True), RunFolder(path)


def test_what_a_killed_run_left_is_verified_by_a_process_of_the_next(
    trained: tuple[RunContext, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = trained
    expected = {
        *(f"{name}.safetensors" for name in ("run", "run-step-000001", "run-step-000002")),
        *("transformer_official", "step-000001/transformer_official"),
    }
    assert len(unverified(folder)) == len(expected)
    with Verifier(run, folder, apart=True) as verifier:
        begun = time.monotonic()
        verifier.start()
        assert verifier.is_busy and not read_results(folder), "it starts, and this process goes on"
        assert time.monotonic() - begun < 60
    num_before = len(read_results(folder))
    assert num_before < len(expected), "it ended with the run"
    with Verifier(run, folder, apart=True) as verifier:
        verifier.wait()
    assert read_results(folder).keys() == expected and all(
        each.agrees for each in read_results(folder).values()
    )
    assert not unverified(folder)
    assert capsys.readouterr().out.count("agrees with our model to ") == len(expected) - num_before


def test_a_process_that_fails_is_one_line_with_its_last_words(
    trained: tuple[RunContext, RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = trained
    (folder.state / "step-000002" / "trainable.safetensors").unlink()
    with Verifier(run, folder, apart=True) as verifier:
        verifier.wait()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not verified: " in line]
    assert "trainable.safetensors is missing or damaged" in line and "status 1" in line
