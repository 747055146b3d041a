"""Previews sampled by a process of their own: the same images, training untouched, nothing lost
however things end."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from preview_runs import FLAGS, bare, check_equal, pending, samples
from safetensors.torch import save_file
from sampling_child import Child, children
from toy_world import World, equal
from two_experts import EXPERTS, TwoExperts
from unfinished import unfinished

from ditkit_core.commands import cli
from ditkit_core.commands.report import say_where_previews_could_be
from ditkit_core.config.resolve import resolve
from ditkit_core.diagnostics.report.data import read_sections
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.models.spec import Expert
from ditkit_core.previews import stages as expert_turns
from ditkit_core.previews import worker as preview_process
from ditkit_core.previews.manager import Previews
from ditkit_core.previews.queue import Preview, drop_after, put, queued, read_preview, read_weights
from ditkit_core.previews.stages import ExpertWeights
from ditkit_core.run import jobs as run_jobs
from ditkit_core.run.checks import check_preview_device
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import RunContext, create_run
from ditkit_core.sampling.denoise import DenoiserStage
from ditkit_core.training import trainer as train

EVERY = ("--ema.decay", "0.9", "--sample.every_steps", "2", "--log.every_steps", "1")
ELSEWHERE = (*EVERY, "--sample.device", "cpu")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # takes long, and nothing here is large
    return World(tmp_path)


@pytest.fixture
def experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoExperts:
    monkeypatch.chdir(tmp_path)
    # half a second each time, and nothing here is large
    monkeypatch.setattr("gc.collect", lambda *_: 0)
    return TwoExperts(tmp_path)


def stopping(monkeypatch: pytest.MonkeyPatch, at: int, *, saves: bool = True) -> None:
    """Have SIGTERM come in optimizer step `at`, or the second Ctrl-C, after which nothing is
    saved."""
    original = train.training_step

    def step(*arguments: Any, **settings: Any) -> Any:
        if arguments[3].step == at:
            if not saves:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **settings)

    monkeypatch.setattr(train, "training_step", step)


STREAMED = (
    "--held_out.clips", "1", "--ema.decay", "0.9", "--adapter.method", "full",
    "--train.swap_blocks", "1",
    "--optim.fused_backward", "true", "--train.clip_norm", "0",
)  # fmt: skip
"""ExpertWeights weights that are streamed, which the parameters do not hold between two steps."""


@pytest.mark.parametrize("given", [FLAGS, STREAMED], ids=["lora", "streamed"])
def test_they_are_those_sampled_in_place_and_disturb_nothing(
    world: World,
    given: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Child, "streamed", int(given is STREAMED))
    flags = (*given, "--sample.every_steps", "2", "--sample.images", "2")
    assert world.train("here", 4, *flags) == 0
    if given is STREAMED:  # test_manager.py has the others
        assert world.train("without", 4, *given, "--sample.captions", "0") == 0
        check_equal(world.folder / "without", world.folder / "here")
    with children(world.spec, "draws") as started:
        assert world.train("there", 4, *flags, "--sample.device", "cpu") == 0
    here, there = world.folder / "here", world.folder / "there"
    check_equal(here, there)
    assert samples(here) == samples(there) and len(samples(here)) == 3 * (2 * 2 + 2)
    assert (
        len(started) == 1
        and started[0].environment["CUDA_VISIBLE_DEVICES"] == ""
        and pending(there) == []
    )
    assert "waiting for 2 previews from cpu" in capsys.readouterr().out
    assert [each.title for each in read_sections(there)[0].samples] == [
        f"step {step}" for step in (0, 2, 4)
    ]
    assert (there / "report.html").read_text().count("<img") == 12


@pytest.mark.slow
def test_a_real_process_samples_the_same(world: World) -> None:
    """Started while training goes on, and found by `ModelSpec.import_path`."""
    assert world.train("here", 6, *EVERY) == 0
    assert world.train("there", 6, *ELSEWHERE) == 0
    here, there = world.folder / "here", world.folder / "there"
    check_equal(here, there)
    log = (there / "previews.log").read_text()
    assert re.findall("process [0-9]+ generates (.*)", log) == [
        f"step-{step:06d}.safetensors" for step in (0, 2, 4)
    ]
    assert samples(here) == samples(there) and pending(there) == []


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux",
    reason="asks /proc whether a process of which it is not the parent is there",
)
def test_a_real_process_ends_with_a_parent_that_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(cli, "run", lambda spec, command, argv: given.extend(argv) or 0)
        world.train("run", 2, *ELSEWHERE, "--sample.steps", "10000000")
    program = "import sys; from ditkit_core.commands import cli; from ditkit_core.testing.toy import TOY; cli.run(TOY, 'train', sys.argv[1:])"
    run = world.folder / "run"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *given],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        found = wait_for(
            lambda: re.findall("process ([0-9]+) generates", text_of(run / "previews.log")),
            seconds=200,
        )
    finally:
        parent.kill()
        parent.wait()
    status = Path(f"/proc/{found[0]}/stat")
    wait_for(
        lambda: not status.exists() or text_of(status).rpartition(")")[2].split()[0] == "Z",
        seconds=60,
    )
    assert pending(run) == ["step-000000.safetensors"] and not (run / "complete.json").exists()
    with children(world.spec, "draws"):
        assert world.train("run", 2, *ELSEWHERE) == 0
    assert {name[:11] for name in samples(run)} == {"step-000000", "step-000002"} and pending(
        run
    ) == []


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition: Callable[[], Any], *, seconds: float) -> Any:
    """What it gives when it gives something."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)
    return found


def test_what_a_stopped_run_leaves_is_sampled_when_it_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("whole", 6, *EVERY) == 0
    run = world.folder / "run"
    with monkeypatch.context() as patched, children(world.spec, "goes on") as started:
        stopping(patched, at=3)
        assert world.train("run", 6, *ELSEWHERE) == 130
    assert len(started) == 1 and started[0].returncode == 130, "one at a time, ended with the run"
    assert pending(run) == [f"step-{step:06d}.safetensors" for step in (0, 2, 4)], (
        "the step that was stopped at, too"
    )
    torn = unfinished(run / "samples" / "pending" / "step-000004.safetensors")
    torn.touch()
    with children(world.spec, "draws") as started:
        assert world.train("run", 6, *ELSEWHERE) == 0
    assert samples(run) == samples(world.folder / "whole")
    assert len(started) == 1 and pending(run) == [] and not torn.exists()
    put(run / "samples" / "pending", Preview(step=2), {})
    capsys.readouterr()
    assert world.train("run", 6, *EVERY) == 0
    said = capsys.readouterr()
    assert "is complete at step 6" in said.out and pending(run) == ["step-000002.safetensors"]
    assert "1 previews wait in" in said.err
    assert (
        "samples/pending; set sample.device to generate them, or remove the files"
        in said.err.replace("\\", "/")
    )


@pytest.mark.slow
def test_what_waits_of_a_run_that_was_given_up_is_not_sampled_into_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not saved, so that another one may begin in its folder."""
    assert world.train("whole", 3, *EVERY) == 0
    run = world.folder / "run"
    with monkeypatch.context() as patched, children(world.spec, "goes on"):
        stopping(patched, at=5, saves=False)
        assert world.train("run", 6, *ELSEWHERE, "--optim.lr", "0.5") == 130
    assert pending(run) == [f"step-{step:06d}.safetensors" for step in (0, 2, 4)] and not any(
        run.glob("state/step-*")
    )
    with children(world.spec, "draws"):
        assert world.train("run", 3, *ELSEWHERE) == 0
    assert samples(run) == samples(world.folder / "whole") and pending(run) == []


def test_a_signal_while_the_last_previews_are_sampled_loses_none(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with children(world.spec, "is interrupted") as started:
        assert world.train("run", 4, *ELSEWHERE) == 130
    run = world.folder / "run"
    assert (
        "stopped with 2 previews left" in capsys.readouterr().err and started[0].returncode == 130
    )
    assert pending(run) == ["step-000000.safetensors", "step-000002.safetensors"]
    assert "Complete at step 4." in (run / "report.html").read_text()
    with children(world.spec, "draws"):
        assert world.train("run", 4, *ELSEWHERE) == 0
    assert "is complete at step 4; nothing is left to do" in capsys.readouterr().out, (
        "it was not ended once more"
    )
    assert pending(run) == [] and (run / "report.html").read_text().count("<img") == 6


def test_one_that_fails_costs_a_warning_and_can_be_sampled_later(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world.folder / "run"
    with children(world.spec, "fails") as started:
        assert world.train("run", 4, *ELSEWHERE) == 0
    said = capsys.readouterr().err
    for name in pending(run):
        assert (
            f"preview {name} was not generated (status 1): error: no room on this device; it stays "
            f"in" in said
        )
    assert "previews not generated: 2" in said and "the same command tries again" in said
    assert pending(run) == ["step-000000.safetensors", "step-000002.safetensors"]
    assert [len(child.command) - len(started[0].command) for child in started] == [0, 1], (
        "one was left out"
    )
    assert (run / "complete.json").exists() and {name[:11] for name in samples(run)} == {
        "step-000004"
    }
    with children(world.spec, "draws"):
        assert world.train("run", 4, *ELSEWHERE) == 0, "which is complete"
    assert pending(run) == [] and {name[:11] for name in samples(run)} == {
        f"step-{step:06d}" for step in (0, 2, 4)
    }
    assert [each.title for each in read_sections(run)[0].samples] == [
        f"step {step}" for step in (0, 2, 4)
    ]


def test_the_preview_that_failed_is_named_whatever_else_waits(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = bare(world)
    names = {step: f"step-{step:06d}.safetensors" for step in (3, 5, 7, 8)}
    put(folder.pending, Preview(step=5), {})
    with (
        children(world.spec, "fails") as started,
        Previews(run_jobs.jobs_of(run), folder, 2, lambda path: None) as previews,
    ):
        put(folder.pending, Preview(step=3), {})
        previews.take(Preview(step=7), {})
        assert (
            f"preview {names[5]} was not generated (status 1): error: no room on this device"
            in capsys.readouterr().err
        )
        folder.previews_log.unlink()
        previews.take(Preview(step=8), {})
        said = capsys.readouterr().err
    assert "previews not generated: 2 (status 1): its log cannot be read; they stay in" in said
    left_out = [child.command[len(started[0].command) :] for child in started]
    assert left_out == [[], [names[5]], [names[3], names[5], names[7]]]


def test_a_preview_that_is_removed_while_it_is_sampled_is_not_missed(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = bare(world)
    came: list[str] = []

    def drawing(run: RunContext, prepared: None, file: Path, scenes: Any) -> None:
        came.append(file.name)
        if file.name != "step-000006.safetensors":
            file.unlink()
        if file.name == "step-000002.safetensors":
            read_preview(file)

    monkeypatch.setattr(preview_process, "_generate", drawing)
    for step in (2, 4, 6):
        put(folder.pending, Preview(step=step), {})
    preview_process.generate_waiting(world.spec, folder.path, "cpu", 0)
    assert (
        came == [f"step-{step:06d}.safetensors" for step in (2, 4, 6)]
        and pending(folder.path) == []
    )
    assert "step-000002.safetensors was removed" in capsys.readouterr().out


def test_previews_have_the_kernels_of_their_own_device(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run stores those of the devices that train."""
    _, folder = bare(world)
    found: list[str] = []
    own = "triton"
    monkeypatch.setattr(
        preview_process,
        "with_kernels",
        lambda run: replace(run, train=replace(run.train, kernels=own)),
    )
    monkeypatch.setattr(
        preview_process, "_generate", lambda jobs, *_: found.append(jobs.run.config.train.kernels)
    )
    put(folder.pending, Preview(step=2), {})
    preview_process.generate_waiting(world.spec, folder.path, "cpu", 0)
    assert found == [own]


@pytest.mark.slow
def test_a_disk_that_is_full_costs_previews_and_no_training(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ditkit_core.previews import manager as previews

    def full(*_: Any) -> None:
        raise UserError("cannot write: No space left on device")

    monkeypatch.setattr(previews, "put", full)
    with children(world.spec, "draws") as started:
        assert world.train("run", 2, *ELSEWHERE) == 0
    assert (
        "no preview of step 0: cannot write: No space left on device" in capsys.readouterr().err
        and not started
    )
    assert (
        world.run("train", "--run", "run", "--train.steps", "3", "--sample.every_steps", "0") == 0
    )
    assert (
        "sample.device = cpu is where previews are generated, and sample.every_steps = 0"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("cuda:7",), "sample.device = 'cuda:7': this machine has no CUDA devices"),
        (
            ("auto",),
            "sample.device = 'auto' must be a device that does not train, such as cuda:1, or cpu",
        ),
        (("cpu", "--train.attention", "flash2"), "attention backend 'flash2'"),
    ],
)
def test_what_cannot_sample_is_refused_before_anything_is_encoded(
    world: World, flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 2, *EVERY, "--sample.device", *flags) in (1, 2)
    said = capsys.readouterr().err
    assert (
        says in said
        and said.startswith("error: ")
        and said.count("\n") == 1
        and world.media.loads == 0
    )


def test_a_device_that_trains_and_a_model_that_is_not_found_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = resolve(
        RunConfig, flags={"sample.device": "cuda:0", "train.devices": ("cuda:0", "cuda:1")}
    )
    with pytest.raises(
        UserError, match="'cuda:0' is a device that trains; name another one or cpu"
    ):
        check_preview_device(create_run(world.spec, config))
    config = replace(config, train=replace(config.train, devices=("cuda:1",)))
    check_preview_device(create_run(world.spec, config))
    with pytest.raises(UserError, match="another process cannot find the model toy"):
        check_preview_device(create_run(replace(world.spec, import_path=""), config))
    for devices, every_steps, told in [
        (("cuda:1",), 5, True),
        (("cuda:1",), 0, False),
        (("cuda:0", "cuda:1"), 5, False),
    ]:
        capsys.readouterr()
        here = replace(
            config, sample=replace(config.sample, device="", every_steps=every_steps, captions=1)
        )
        say_where_previews_could_be(here.sample, tuple(map(torch.device, devices)))
        said = "".join(capsys.readouterr())
        assert (
            "set sample.device = cuda:0 (idle) to generate them in the background" in said
        ) is told


@pytest.mark.slow
def test_a_run_that_waits_for_its_previews_hears_of_an_idle_gpu(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert world.train("run", 1, *EVERY) == 0
    said = "".join(capsys.readouterr())
    assert said.count("set sample.device = cuda:0 (idle)") == 1


def test_each_of_two_experts_is_sampled_while_it_trains(
    experts: TwoExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights of the preview; the other one as it was trained by then, or as it is."""
    world, tmp_path, names = experts, experts.folder, tuple(expert.name for expert in EXPERTS)
    flags = ("--ema.decay", "0.9", "--sample.steps", "2")
    assert world.train("plain", 2, *flags, "--sample.captions", "0") == 0
    loaded: list[tuple[str, str]] = []
    turn = expert_turns._stage

    def noted(
        run: RunContext, expert: Expert, trained: ExpertWeights, guidance: float
    ) -> DenoiserStage:
        loaded.append((expert.name, trained.preview.name if trained.preview else str(trained.step)))
        return turn(run, expert, trained, guidance)

    asked: list[str] = []
    latest = run_jobs.latest

    def counted(state: Path, warn: Callable[[str], None]) -> Path | None:
        asked.append(state.parent.name)
        return latest(state, warn)

    monkeypatch.setattr(expert_turns, "_stage", noted)
    monkeypatch.setattr(run_jobs, "latest", counted)
    with children(world.spec, "draws") as started:
        every = ("--sample.every_steps", "1", "--sample.device", "cpu", "--sample.captions", "1")
        assert world.train("both", 2, *flags, *every) == 0
    assert len(started) == 1
    assert asked == [names[1], names[0], *names], (
        "saves are read whole: those of the others once, those of all at the end"
    )
    previews = [f"{name}-step-{step:06d}.safetensors" for name in names for step in (0, 1)]
    at_the_end, drawn_late = loaded[:2], loaded[2:]
    assert at_the_end == [(name, "2") for name in names]
    assert drawn_late == [
        (names[0], previews[0]), (names[1], "None"), (names[0], previews[1]), (names[1], "None"),
        (names[0], "2"), (names[1], previews[2]), (names[0], "2"), (names[1], previews[3]),
    ]  # fmt: skip
    for name in names:
        assert equal(world.exported("plain", name), world.exported("both", name))
        folder = world.folder / "both" / name
        pictures = {
            file[:11]: picture for file, picture in samples(folder).items() if file.endswith(".png")
        }
        assert (
            pictures.keys() == {"step-000000", "step-000001"} and len(set(pictures.values())) == 2
        )
    sections = {
        section.name: [each.title for each in section.samples]
        for section in read_sections(tmp_path / "both")
    }
    drawn_in = {
        "high_noise": ["step 0", "step 1"],
        "low_noise": ["step 0", "step 1"],
        "": ["step 2"],
    }
    assert sections == drawn_in
    assert (tmp_path / "both" / names[0] / "report.html").read_text().count("<img") == 2
    assert pending(tmp_path / "both") == [] and {
        file[:11] for file in samples(tmp_path / "both")
    } == {"step-000002"}


def test_a_signal_in_the_last_wait_of_two_experts_leaves_a_complete_run(
    experts: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--sample.device", "cpu", "--sample.captions", "1", "--sample.steps", "2")
    with children(experts.spec, "is interrupted"):
        assert experts.train("both", 1, *flags, "--sample.every_steps", "1") == 130
    assert RunFolder(experts.folder / "both").completed_step() == 1
    assert pending(experts.folder / "both") == [
        f"{expert.name}-step-000000.safetensors" for expert in EXPERTS
    ]
    capsys.readouterr()
    with children(experts.spec, "draws"):
        assert experts.train("both", 1, *flags, "--sample.every_steps", "0") == 0
    said = capsys.readouterr()
    assert (
        "is complete; nothing is left to do" in said.out and pending(experts.folder / "both") == []
    )
    assert (
        said.err.count(
            "sample.device = cpu is where previews are generated, and sample.every_steps = 0"
        )
        == 1
    )


def test_a_run_of_one_expert_samples_with_the_other_as_it_is(
    experts: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    world, tmp_path = experts, experts.folder
    flags = (
        *ELSEWHERE,
        "--sample.captions",
        "1",
        "--sample.steps",
        "2",
        "--experts.train",
        "low_noise",
    )
    with children(world.spec, "draws"):
        assert world.train("low", 3, *flags) == 0
    assert "sampling with the high_noise expert with its base weights" in capsys.readouterr().out
    assert {name[:11] for name in samples(tmp_path / "low")} == {
        f"step-{step:06d}" for step in (0, 2, 3)
    }
    (tmp_path / "toy_high_noise.safetensors").unlink()
    with children(world.spec, "draws") as started:
        assert world.train("alone", 3, *flags) == 0
    assert "no previews: " in capsys.readouterr().err and not started


def test_its_process_computes_fp32_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A VAE and a text encoder run in no engine; by default torch rounds the operands of
    convolutions to TF32."""
    monkeypatch.setattr(
        preview_process, "work", lambda generate: int(torch.backends.cudnn.allow_tf32)
    )
    torch.backends.cudnn.allow_tf32 = True
    assert preview_process.main(["ditkit_core.testing.toy:TOY", str(tmp_path), "cuda", "0"]) == 0


def test_the_queue_holds_what_it_is_given(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16()}
    asked = Preview(step=12, expert="low_noise", others={"high_noise": 40})
    for step in (1000000, 3, 999999):
        put(tmp_path, Preview(step=step, expert="high_noise"), weights)
    put(tmp_path, asked, weights)
    (tmp_path / ".step-000001.safetensors.0123abcd.tmp").touch()
    files = queued(tmp_path)
    assert len(files) == 4 and not any(file.name.startswith(".") for file in files)
    assert [read_preview(file).step for file in files] == [3, 999999, 1000000, 12] and read_preview(
        files[-1]
    ) == asked
    found = read_weights(files[-1])
    assert found.keys() == weights.keys() and all(
        torch.equal(found[name], weights[name]) for name in weights
    )
    save_file(weights, tmp_path / "step-000007.safetensors")
    with pytest.raises(UserError, match="is not a queued preview; remove it"):
        read_preview(tmp_path / "step-000007.safetensors")
    drop_after(tmp_path, {"high_noise": 999999, "low_noise": -1})
    assert [file.name for file in queued(tmp_path)] == [
        "step-000007.safetensors", "high_noise-step-000003.safetensors",
        "high_noise-step-999999.safetensors",
    ]  # fmt: skip
