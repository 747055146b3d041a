"""Samples of a model of two experts, by the commands: each step with its expert, in whatever
company, from a run and from files."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from two_experts import BOUNDARY, EXPERTS, STEPS, TwoExperts

NAMES = tuple(expert.name for expert in EXPERTS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoExperts:
    monkeypatch.chdir(tmp_path)
    return TwoExperts(tmp_path)


def error(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1, said
    return said


def test_each_step_of_a_sample_goes_to_its_expert(world: TwoExperts) -> None:
    assert world.train("both", 1, "--sample.images", "2") == 0
    steps = world.sampler.steps
    patch = {name: world.base[name]["patch_in.weight"] for name in NAMES}
    assert len(steps) == 4 * STEPS
    for _, level, weight, guidance in steps:
        name = "high_noise" if level >= BOUNDARY else "low_noise"
        assert (
            torch.equal(weight, patch[name])
            and guidance == {"high_noise": 4.0, "low_noise": 3.0}[name]
        )
    assert Counter(seed for seed, *_ in steps) == {0: 2 * STEPS, 1: 2 * STEPS}
    assert [level >= BOUNDARY for _, level, *_ in steps] == [True] * 8 + [False] * 32, (
        "all of the one, then all of the other"
    )
    steps.clear()
    assert world.run("sample", "--run", "both", "--sample.guidance", "1.5") == 0
    assert {guidance for *_, guidance in steps} == {1.5}


def test_a_sample_over_the_boundary_is_the_same_alone_and_among_others(world: TwoExperts) -> None:
    """Its scheduler's history goes over with it."""
    assert world.train("both", 1, "--sample.captions", "0") == 0
    for prompts, out in ((("a", "b", "c"), "many"), (("b",), "one")):
        flags = [part for prompt in prompts for part in ("--prompt", prompt)]
        assert world.run("sample", "--run", "both", *flags, "--out", out) == 0
    a, b, alone = (
        Path(out, f"sampled-001-step-000001-{name}.png").read_bytes()
        for out, name in (("many", "0-a"), ("many", "1-b"), ("one", "0-b"))
    )
    assert b == alone and a != alone


def test_adapter_files_are_sampled_with_as_the_run_samples(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("both", 3, "--sample.captions", "0") == 0
    high, low = (f"both/exports/both_{name}.safetensors" for name in NAMES)
    asked = ("--prompt", "a")

    def sampled(out: str, *flags: str) -> bytes:
        assert world.run("sample", *flags, *asked, "--out", out) == 0
        (file,) = Path(out).glob("*-0-a.png")
        return file.read_bytes()

    trained = sampled("trained", "--run", "both")
    assert sampled("files", "--adapter", high, "--adapter-low", low) == trained
    others = {sampled("high", "--adapter", high), sampled("low", "--adapter-low", low)}
    assert len(others | {trained}) == 3
    capsys.readouterr()
    assert world.run("sample", "--adapter", low, *asked) == 1
    assert "named after the low_noise expert, and this is the high_noise one" in error(capsys)
    one = (
        "--model.preset",
        "one",
        "--model.transformer",
        "toy.safetensors",
        "--model.transformer_2",
        "",
    )
    assert world.run("sample", *one, "--adapter-low", low, *asked) == 1
    assert "--adapter-low is for the second of two experts" in error(capsys)
    assert world.run("sample", "--run", "nowhere", *asked) != 0
