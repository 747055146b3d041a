"""What one of two ranks has alone: both decide together what follows, and one line names the rank that failed."""

import json
import re
import sys
from pathlib import Path

import pytest

from ditkit_core.testing.conformance_replicas import run_once

SCRIPT = Path(__file__).parents[1] / "support" / "one_rank_of_toy.py"
STEPS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked"),
]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script wrote; all cases run in one start of it."""
    return run_once(tmp_path_factory.getbasetemp(), SCRIPT, 550)


def saves(folder: Path, name: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / name / "state").glob("step-*"))


def lines(folder: Path, name: str) -> list[str]:
    """Errors that either rank printed."""
    logs = [(folder / f"{name} {rank}.log").read_text() for rank in range(2)]
    return [line for log in logs for line in log.splitlines() if line.startswith("error: ") or "Traceback" in line]


def samples(folder: Path, name: str) -> dict[Path, bytes]:
    """Every file of the folders of samples."""
    paths = [path for path in (folder / name).rglob("samples/*") if path.is_file()]
    return {path.relative_to(folder / name): path.read_bytes() for path in paths}


def result(folder: Path, name: str) -> dict:
    return json.loads((folder / "cases.json").read_text())[name]


def test_two_ranks_save_measure_and_sample_as_one(folder):
    """The index of a save has the digests of weights, optimizer, average and metrics."""
    assert result(folder, "plain") == {"codes": {}}, lines(folder, "plain")
    assert saves(folder, "plain") == saves(folder, "alone") == [2, 4]
    for step in (2, 4):
        one, two = (
            json.loads((folder / name / f"state/step-{step:06d}/state.json").read_text()) for name in ("alone", "plain")
        )
        assert one == two
    assert samples(folder, "plain") == samples(folder, "alone")
    previews = [path for path in samples(folder, "plain") if path.name.startswith("step-000002")]
    assert len(previews) == 5, "three samples, their list, and the image of all"
    assert (folder / "plain 1.log").read_text() == ""


def test_ranks_that_divide_weights_and_tokens_sample_as_one_with_an_adapter_for_samples(folder):
    """Before training, whose sums over ranks have another order. The adapter is an export of another run."""
    assert result(folder, "adapter") == {"codes": {}}, lines(folder, "adapter")
    alone, two = (samples(folder, name) for name in ("adapter alone", "adapter"))
    assert alone.keys() == two.keys() == samples(folder, "alone").keys()
    for path, content in alone.items():
        if path.name.startswith("step-000000"):
            assert content == two[path]
            assert content != samples(folder, "alone")[path] or path.suffix == ".json"


def test_ranks_that_exchange_experts_sample_as_one(folder):
    """Previews of each expert, and the samples of both at the end."""
    assert result(folder, "experts") == {"codes": {}}, lines(folder, "experts")
    found = samples(folder, "experts")
    assert found == samples(folder, "experts alone")
    assert {str(path.parent) for path in found} == {"samples", "high_noise/samples", "low_noise/samples"}


def test_previews_that_one_rank_cannot_generate_are_left_out_on_both_in_one_line(folder):
    """The second rank misses a file when training begins, and has it at the end."""
    name = "experts of one"
    assert result(folder, name) == {"codes": {}}, lines(folder, name)
    assert (folder / f"{name} 1.log").read_text() == ""
    for expert in ("high_noise", "low_noise"):
        said = f"no previews of the {expert} expert: a file is missing\n"
        assert (folder / f"{name} 0.log").read_text().count(said) == 1
    at_the_end = {path: each for path, each in samples(folder, "experts").items() if str(path.parent) == "samples"}
    assert at_the_end and samples(folder, name) == at_the_end


def test_a_signal_to_one_rank_stops_both_after_the_same_step_with_a_save(folder):
    assert set(result(folder, "stopped")["codes"].values()) == {130}
    (step,) = saves(folder, "stopped")
    assert 2 <= step < STEPS
    assert f"stopped at step {step}, saved in" in (folder / "stopped 0.log").read_text() and not lines(
        folder, "stopped"
    )


def test_the_first_rank_alone_decides_by_the_clock_when_both_save(folder):
    assert result(folder, "fast clock of 0") == result(folder, "fast clock of 1") == {"codes": {}}
    assert saves(folder, "fast clock of 0") == [1, 2, 3, 4]
    assert saves(folder, "fast clock of 1") == [4]


@pytest.mark.parametrize(
    ("name", "rank", "step", "said"),
    [
        (
            "no memory",
            1,
            3,
            r"out of memory \(CUDA out of memory. Tried to allocate 2.00 GiB\); without torchrun, --plan shows",
        ),
        ("cannot save", 0, 4, r"cannot write .*step-000004: No space left on device; free some space"),
        ("cannot read", 1, 4, r"a disk that is gone"),
        ("cannot sample", 1, 2, r"the sample of 'a dog' is not finite"),
    ],
)
def test_what_one_rank_cannot_do_is_one_line_that_names_it(folder, name, rank, step, said):
    (line,) = lines(folder, name)
    assert re.match(rf"error: rank {rank} of 2 on \S+ in step {step}: .*{said}", line)
    assert line.removeprefix("error: ") in result(folder, name)["said"], "torchrun's summary has it, too"
    assert saves(folder, name) == [2], "the save before it stays"


def test_the_same_command_generates_the_preview_that_one_rank_could_not(folder):
    """A sample of it is there, and its list is not."""
    assert not list((folder / "cannot sample").glob("samples/step-000002.json"))
    assert result(folder, "sampled again") == {"codes": {}}, lines(folder, "sampled again")
    assert samples(folder, "sampled again") == samples(folder, "alone")


def test_a_loss_that_is_not_finite_on_one_rank_ends_both_with_its_evidence(folder):
    (line,) = lines(folder, "not finite")
    (file,) = (folder / "not finite").glob("failure-step-*.json")
    assert str(file) in line and saves(folder, "not finite") == [2]
    assert line.removeprefix("error: ") in result(folder, "not finite")["said"]
    evidence = json.loads(file.read_text())
    broken = [sample["micro_batch"] for sample in evidence["samples"] if sample["loss"] == "nan"]
    assert broken == [1, 2] and len(evidence["samples"]) == 3, "of three micro-batches, those of the second rank"
    assert evidence["where"]["micro_batch"] == 1


def test_ranks_with_other_settings_are_refused_before_anything_is_written(folder):
    (line,) = lines(folder, "other flags")
    assert re.search(r"rank 1 on \S+ has another configuration \(\w+\) than rank 0 on", line)
    assert line.removeprefix("error: ") in result(folder, "other flags")["said"]
    assert not (folder / "other flags").exists()
