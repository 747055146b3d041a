"""What follows a save: nothing of it is lost when a kill comes between the two, and nothing stale
stays."""

import os
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from preview_runs import check_equal, numbers, pending
from safetensors.torch import load_file
from sampling_child import children
from toy_world import World, equal

from ditkit_core.adapters.files import export as adapters
from ditkit_core.commands import cli, export
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.previews import callbacks, manager
from ditkit_core.sampling import render
from ditkit_core.testing.killed import Killed
from ditkit_core.training import trainer

STEPS = 5
FLAGS = (
    "--save.every_steps", "2", "--save.keep_last", "1", "--sample.every_steps", "2", "--ema.decay",
    "0.9",
    "--export.forms", '["official", "diffusers"]', "--log.every_steps", "1",
)  # fmt: skip
MERGED = (*FLAGS, "--export.merged", "true")
FULL = (*FLAGS, "--adapter.method", "full")
QUEUED = (*FLAGS, "--sample.device", "cpu")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    # half a second each time, and nothing here is large
    monkeypatch.setattr("gc.collect", lambda *_: 0)
    return World(tmp_path, captions=1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], World]:
    """The world of a run that was never killed, by its flags."""

    @cache
    def trained(flags: tuple[str, ...]) -> World:
        world = World(tmp_path_factory.mktemp("undisturbed"), captions=1)
        with children(world.spec, "draws"), pytest.MonkeyPatch.context() as patch:
            patch.setattr("gc.collect", lambda *_: 0)
            assert world.train("whole/run", STEPS, *flags) == 0
        return world

    return trained


def killed_at(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    when: Callable[..., bool],
    *,
    after: bool = False,
) -> None:
    """Have a kill come where a function is called with certain arguments, once."""
    original, left = getattr(module, name), [1]

    def call(*arguments: Any, **settings: Any) -> Any:
        is_here = left and when(*arguments, *settings.values())
        done = original(*arguments, **settings) if after or not is_here else None
        if is_here:
            left.clear()
            raise Killed
        return done

    monkeypatch.setattr(module, name, call)


def about(step: int) -> Callable[..., bool]:
    return lambda *arguments: any(f"step-{step:06d}" in str(each) for each in arguments)


def files(run: Path) -> dict[str, bytes]:
    """All exports and samples."""
    found = (
        path
        for name in ("exports", "samples")
        for path in (run / name).rglob("*")
        if path.is_file()
    )
    return {str(path.relative_to(run)): path.read_bytes() for path in found}


KILLS: dict[str, tuple[tuple[str, ...], Callable[[pytest.MonkeyPatch], None]]] = {
    "before the export": (
        FLAGS,
        lambda patch: killed_at(patch, export, "export_adapter", about(2)),
    ),
    "between two forms": (
        FLAGS,
        lambda patch: killed_at(
            patch,
            adapters,
            "write_adapter",
            lambda path, *_: path.name == "run-step-000004_diffusers.safetensors",
        ),
    ),
    "before the merged model": (
        MERGED,
        lambda patch: killed_at(patch, export, "export_merged", about(4)),
    ),
    "in the merged model": (
        MERGED,
        lambda patch: killed_at(patch, export, "export_merged", about(4), after=True),
    ),
    "in a full fine-tune": (
        FULL,
        lambda patch: killed_at(patch, export, "export_merged", about(2), after=True),
    ),
    "before stale ones go": (
        FLAGS,
        lambda patch: killed_at(
            patch, export.Exporter, "_remove_stale", lambda self, *_: self._folder.save(4).exists()
        ),
    ),
    "before stale saves go": (
        FLAGS,
        lambda patch: killed_at(
            patch, trainer, "save_state", lambda folder, state, _: state.step == 5, after=True
        ),
    ),
    "before a preview": (
        FLAGS,
        lambda patch: killed_at(patch, callbacks, "generate_samples", about(2)),
    ),
    "before a preview's list": (
        FLAGS,
        lambda patch: killed_at(patch, render, "write_text", about(4)),
    ),
    "before a preview is queued": (
        QUEUED,
        lambda patch: killed_at(patch, manager, "put", lambda _, preview, *__: preview.step == 4),
    ),
    "before the last export": (
        MERGED,
        lambda patch: killed_at(patch, export, "export_adapter", lambda *given: "run" in given),
    ),
    "before it is complete": (
        MERGED,
        lambda patch: killed_at(patch, RunFolder, "mark_complete", lambda *_: True),
    ),
}


DAILY = (
    "between two forms",
    "in the merged model",
    "before stale saves go",
    "before a preview is queued",
)
"""Kills in four parts of what follows a save; the slow set has the others."""


@pytest.mark.parametrize(
    "kill", [pytest.param(kill, marks=() if kill in DAILY else pytest.mark.slow) for kill in KILLS]
)
def test_what_a_kill_after_a_save_prevented_is_made_up_for(
    undisturbed: Callable[[tuple[str, ...]], World], monkeypatch: pytest.MonkeyPatch, kill: str
) -> None:
    flags, patch = KILLS[kill]
    world, name = undisturbed(flags), f"{kill}/run"
    with children(world.spec, "draws"):
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patch(patched)
            world.train(name, STEPS, *flags)
        assert world.train(name, STEPS, *flags) == 0
    whole, killed = world.folder / "whole" / "run", world.folder / name
    assert files(killed) == files(whole) and (killed / "report.html").exists()
    check_equal(whole, killed)
    assert pending(killed) == []


def test_the_preview_of_the_step_that_sigterm_ends_is_generated_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = trainer.training_step

    def step(*arguments: Any, **settings: Any) -> Any:
        if arguments[3].step == 1:
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "training_step", step)
        assert world.train("run", 3, *FLAGS) == 130
    assert not (world.folder / "run" / "samples" / "step-000002.json").exists()
    assert world.train("run", 3, *FLAGS) == 0
    assert {name for name in os.listdir("run/samples") if name.endswith(".json")} == {
        f"step-{step:06d}.json" for step in (0, 2, 3)
    }


@pytest.mark.parametrize("at", [0, 2])
def test_a_preview_ends_when_sigterm_comes_and_is_generated_later(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], at: int
) -> None:
    """The run saves and ends where it is: no further step is trained, and no further denoising step
    taken."""
    original, steps = callbacks.generate_samples, list[int]()

    def generate(
        run: Any, stages: Any, prompts: Any, folder: Path, stem: str, shares: Any, is_stopping: Any
    ) -> Any:
        def asked() -> bool:
            if stem == f"step-{at:06d}":
                steps.append(at)
                signal.raise_signal(signal.SIGTERM)
            return bool(is_stopping())

        return original(run, stages, prompts, folder, stem, shares, asked)

    flags = ("--sample.every_steps", "2", "--sample.steps", "3", "--log.every_steps", "1")
    with monkeypatch.context() as patched:
        patched.setattr(callbacks, "generate_samples", generate)
        assert world.train("run", 3, *flags) == 130
    folder = RunFolder(world.folder / "run")
    assert steps == [at] and not (folder.samples / f"step-{at:06d}.json").exists()
    assert [path.name for path in Path("run/state").glob("step-*")] == (
        ["step-000002"] if at else []
    )
    said = (
        f"stopped at step 2, saved in {folder.save(2)}" if at else "stopped before the first step"
    )
    assert f"{said}; the same command continues" in capsys.readouterr().err
    assert world.train("run", 3, *flags) == 0
    assert {path.name for path in folder.samples.glob("*.json")} == {
        f"step-{step:06d}.json" for step in (0, 2, 3)
    }
    assert world.train("whole", 3, *flags) == 0
    assert numbers(world.folder / "whole") == numbers(folder.path)
    assert equal(
        load_file("run/exports/run.safetensors"), load_file("whole/exports/whole.safetensors")
    )


def test_what_is_whole_is_not_written_again_and_what_is_older_than_its_save_is(
    world: World,
) -> None:
    flags = (*FLAGS, "--save.every_steps", "1")
    assert world.train("run", 2, *flags) == 0
    whole, old = (
        Path("run/exports") / f"run-step-000002{form}.safetensors" for form in ("", "_diffusers")
    )
    # not views of a file that is overwritten
    known = {name: tensor.clone() for name, tensor in load_file(old).items()}
    before = whole.stat().st_mtime_ns
    assert world.train("run", 3, *flags, "--save.keep_last", "2") == 0
    assert whole.stat().st_mtime_ns == before

    # Of a run that was set back to an earlier save and has trained this step again.
    old.write_bytes(b"other weights")
    os.utime(old, (0, 0))
    preview = Path("run/samples/step-000002.json")
    preview.write_text("{}")
    os.utime(preview, (0, 0))
    for path in sorted(Path("run/state/step-000003").iterdir()):
        path.unlink()
    Path("run/state/step-000003").rmdir()
    assert world.train("run", 4, *flags, "--save.keep_last", "3") == 0
    assert equal(load_file(old), known) and preview.read_text() != "{}"


def test_exports_of_an_earlier_version_are_continued_under_the_name_of_the_run(
    world: World,
) -> None:
    assert world.train("run", 2, "--save.every_steps", "1", "--save.keep_last", "1") == 0
    exports = Path("run/exports")
    for name in ("", "-step-000002"):
        (exports / f"run{name}.safetensors").rename(exports / f"adapter{name}.safetensors")
    mine = exports / "adapter-mine.safetensors"
    mine.write_bytes(b"a file of the user's")
    assert world.train("run", 3, "--save.every_steps", "1", "--save.keep_last", "1") == 0
    assert set(os.listdir(exports)) == {mine.name, "run.safetensors", "run-step-000003.safetensors"}


@pytest.mark.parametrize("steps", [2, 3], ids=["complete", "continued"])
def test_adapters_of_a_folder_that_was_renamed_get_its_name(
    world: World, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    flags = (
        "--save.every_steps",
        "1",
        "--save.keep_last",
        "1",
        "--export.forms",
        '["official", "diffusers"]',
    )
    assert world.train("run", 2, *flags) == 0
    Path("run").rename("v1.5 new")
    exports = Path("v1.5 new/exports")
    mine = exports / "run-mine.safetensors"
    mine.write_bytes(b"a file of the user's")
    capsys.readouterr()
    assert world.train("v1.5 new", steps, *flags) == 0
    stems = ("v1.5 new", f"v1.5 new-step-{steps:06d}")
    written = {f"{stem}{form}.safetensors" for stem in stems for form in ("", "_diffusers")}
    assert set(os.listdir(exports)) == {mine.name, *written}
    assert f"adapter:  {exports.resolve() / 'v1.5 new.safetensors'}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["run", "adapter-v2"])
def test_the_copy_under_the_earlier_name_of_an_experts_adapter_is_replaced(
    tmp_path: Path, name: str
) -> None:
    whole, own = RunFolder(tmp_path / name), RunFolder(tmp_path / name / "low_noise")
    for file in (
        whole.exports / "adapter_low_noise.safetensors",
        own.exports / "low_noise.safetensors",
    ):
        file.parent.mkdir(parents=True)
        file.write_text(file.name)
    job: Any = SimpleNamespace(name="low_noise", folder=own)
    export.copy_expert_adapters(job, whole)
    assert os.listdir(whole.exports) == [f"{name}_low_noise.safetensors"]


def test_what_out_names_is_not_replaced(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(command: str, *flags: str) -> str:
        assert cli.run(world.spec, command, ["--run", "run", *flags]) == 1
        return capsys.readouterr().err

    assert world.train("run", 1) == 0
    Path("mine.safetensors").write_text("mine")
    assert "mine.safetensors exists; name another one with --out" in refused(
        "export", "--out", "mine.safetensors"
    )
    assert Path("mine.safetensors").read_text() == "mine"
    merge = ("--merge", "--out", "merged")
    assert cli.run(world.spec, "export", ["--run", "run", *merge]) == 0
    whole = Path("merged", "transformer_official")
    before = {path: path.read_bytes() for path in whole.iterdir()}
    assert f"{whole} exists; name another one with --out" in refused("export", *merge)
    assert {path: path.read_bytes() for path in whole.iterdir()} == before
    with pytest.raises(
        UserError, match=re.escape(f"merged contains no .safetensors file; name {whole}")
    ):
        SafetensorsSource.open(Path("merged"))
    # of samples, and of a sheet: before anything is loaded
    for out in ("a.mp4", "mine.safetensors"):
        for strengths in ((), ("--strengths", "1")):
            assert "is the name of a file, and several are written; name a folder" in refused(
                "sample", "--prompt", "x", "--out", out, *strengths
            )
    assert not Path("a.mp4").exists() and Path("mine.safetensors").read_text() == "mine"


def test_an_adapter_goes_into_the_folder_of_comfyui(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the form that it reads, whatever forms the run writes."""
    command = ["--run", "run", "--comfyui", "ComfyUI", "--export.forms", "diffusers"]
    assert world.train("run", 1) == 0
    assert cli.run(world.spec, "export", command) == 1
    assert "ComfyUI: there is no models/diffusion_models, models/vae" in capsys.readouterr().err
    Path("ComfyUI", "models", "vae").mkdir(parents=True)
    assert cli.run(world.spec, "export", command) == 0
    (file,) = Path("ComfyUI", "models", "loras").iterdir()
    official = Path("run", "exports", "run.safetensors")
    assert file.name == official.name
    assert equal(load_file(file), load_file(official))


def test_the_same_export_again_changes_nothing_and_another_content_is_refused(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1) == 0
    again = ("--run", "run", "--to", "musubi")
    assert world.run("export", *again) == 0
    (file,) = Path("run/exports").glob("run-export-*_musubi.safetensors")
    before, content = file.stat(), file.read_bytes()
    assert world.run("export", *again) == 0
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert str(file) in capsys.readouterr().out
    assert (
        world.run(
            "export",
            *again,
            "--dtype",
            "bf16" if "F32" in content[:2000].decode(errors="replace") else "fp32",
        )
        == 1
    )
    said = capsys.readouterr().err
    assert (
        f"{file} exists with another content, such as of another dtype; name another one with --out"
        in said
    )
    assert file.read_bytes() == content and not [
        path for path in Path("run/exports").iterdir() if path.name.startswith(".")
    ]


def test_a_merged_transformer_is_not_replaced_either(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 1) == 0
    assert world.run("export", "--run", "run", "--merge", "--dtype", "fp32") == 0
    (file,) = Path("run/exports").rglob("run-export-*/transformer_official/*.safetensors")
    before = file.stat().st_mtime_ns
    assert (
        world.run("export", "--run", "run", "--merge", "--dtype", "fp32") == 0
        and file.stat().st_mtime_ns == before
    )
    assert world.run("export", "--run", "run", "--merge", "--dtype", "bf16") == 1
    assert (
        f"{file} exists with another content" in capsys.readouterr().err
        and file.stat().st_mtime_ns == before
    )
