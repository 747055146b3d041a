"""The parts of tools/gpu/gpu_truth.py that train from files to an adapter, with the commands: the
demos of Wan and FLUX.2, and a model of real size."""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from PIL import Image

from device_clock import mebibytes, milliseconds
from ditkit_core.io.memory import release_memory
from ditkit_flux2.demo import write as demo_checkpoint

Rows = Iterator[dict[str, Any]]


def demos(device: torch.device, tiny: bool) -> Rows:
    """The demos of Wan and FLUX.2 from files to an adapter on this device, then continued; if tiny
    only Wan's, because `real` trains FLUX.2."""
    steps = 2 if tiny else 30
    for family in ("wan",) if tiny else ("wan", "flux2"):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            flags = [
                *_on(device),
                "--log.every_steps",
                "1",
                *(["--sample.steps", "2"] if tiny else []),
            ]
            for number, given in (
                (steps, ["--demo", "--run.folder", str(run)]),
                (2 * steps, ["--run", str(run)]),
            ):
                done = _command(family, folder, *given, *flags, "--train.steps", str(number))
                yield {"name": f"{family} to step {number}", **_outcome(done, run, number)}


def real(device: torch.device, tiny: bool) -> Rows:
    """A LoRA of blocks as many and as wide as FLUX.2 klein 4B's, random weights, on images of 1024
    x 1024: planned, trained and resumed.

    The VAE and the text encoder are the demo's, so the transformer's first and last layers are
    narrower than the real ones.
    """
    steps, side = (2, 64) if tiny else (20, 1024)
    with tempfile.TemporaryDirectory() as folder:
        run, base = Path(folder) / "run", Path(folder) / "checkpoint"
        _write_checkpoint(base, device, tiny)
        _write_images(Path(folder) / "images", side)
        given = [
            "--run.folder", str(run), "--model.base", str(base), "--model.dtype", "bf16",
            "--data.folder", str(Path(folder) / "images"),
            "--data.height", str(side), "--data.width", str(side), "--adapter.rank", "32",
            "--train.checkpointing", "full",
            "--held_out.clips", "1", "--sample.captions", "0", "--log.every_steps", "1",
            "--log.tensorboard", "false", *_on(device),
        ]  # fmt: skip
        asked = _command("flux2", folder, *given, "--plan", "--json")
        if not asked.stdout.strip():
            yield {"name": "plan", **_outcome(asked, run, 0)}
            return
        plan = json.loads(asked.stdout)
        planned = max(each["peak"] for each in plan["devices"])
        for number in (steps,) if tiny else (steps, 2 * steps):  # the demo is resumed if tiny, too
            done = _command("flux2", folder, *given, "--train.steps", str(number))
            rows = _metrics(run / "metrics.jsonl")
            peak = max((row["peak_memory_bytes"] for row in rows), default=0)
            parts = {
                part: milliseconds(statistics.median(row[f"seconds/{part}"] for row in rows))
                if rows
                else None
                for part in ("forward", "recompute", "backward", "optimizer", "copies", "waiting")
            }
            mfu, ended = (rows[-1].get("mfu") if rows else None) or 0.0, _outcome(done, run, number)
            ended["ok"] &= mfu <= 1
            # On a CPU the peak is that of the process, not of its tensors.
            share = {"planned / measured": planned / peak} if peak and device.type == "cuda" else {}
            yield {
                "name": f"to step {number}", **ended, **parts, "mfu": mfu or "",
                "peak": mebibytes(peak), **share,
                "planned": _seconds(plan),
            }  # fmt: skip


def _seconds(plan: dict[str, Any]) -> str:
    seconds = plan["seconds_per_step"]
    return "" if seconds is None else f"{milliseconds(seconds)} a step"


def _write_checkpoint(folder: Path, device: torch.device, tiny: bool) -> None:
    folder.mkdir()
    demo_checkpoint.write_checkpoint(folder)
    blocks = (1, 2) if tiny else (5, 20)
    torch.manual_seed(0)
    with device:
        model = Flux2Transformer2DModel(
            in_channels=4 * demo_checkpoint.LATENT_CHANNELS, num_layers=blocks[0],
            num_single_layers=blocks[1],
            num_attention_heads=2 if tiny else 24, attention_head_dim=128,
            joint_attention_dim=3 * demo_checkpoint.TEXT_DIM, guidance_embeds=False,
        )  # fmt: skip
    model.to(torch.bfloat16).save_pretrained(folder / "transformer")
    del model
    release_memory()  # which the run, in a process of its own, needs


def _write_images(folder: Path, side: int) -> None:
    """Six images of smooth noise with captions."""
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    for number in range(6):
        pixels = (256 * torch.rand(8, 8, 3, generator=random)).byte().numpy()
        Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(
            folder / f"{number}.png"
        )
        (folder / f"{number}.txt").write_text(
            f"a red circle on the left {number}", encoding="utf-8"
        )


def _on(device: torch.device) -> list[str]:
    return ["--train.device", str(device), "--encode.device", str(device)]


def _command(family: str, folder: str, *given: str) -> "subprocess.CompletedProcess[str]":
    """The train command in a process of its own; without a GPU a copy (`fork`) of this one, which
    has imported what it imports."""
    if torch.cuda.is_available():
        script = f"import sys; from ditkit_{family}.cli import train; sys.exit(train())"
        done = subprocess.run(
            [sys.executable, "-c", script, *given],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
    else:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        copy = multiprocessing.get_context("fork").Process(
            target=_train, args=(family, folder, given, files)
        )
        copy.start()
        copy.join()
        assert copy.exitcode is not None
        printed = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        done = subprocess.CompletedProcess(given, copy.exitcode, *printed)
    sys.stderr.write(done.stderr)  # whose warnings gpu_truth.py lists
    return done


def _train(family: str, folder: str, given: Sequence[str], files: Sequence[Path]) -> None:
    """In the copy."""
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.chdir(folder)
    sys.argv = ["-c", *given]
    sys.exit(import_module(f"ditkit_{family}.cli").train())


def _outcome(done: "subprocess.CompletedProcess[str]", run: Path, steps: int) -> dict[str, Any]:
    """How a command ended, whether it reached its last step, and the median of its steps' times."""
    rows = _metrics(run / "metrics.jsonl")
    last = (
        (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        if done.returncode
        else ""
    )
    taken = statistics.median(row["seconds"] for row in rows) if rows else None
    reached = max((row["step"] for row in rows), default=0)
    return {
        "a step": milliseconds(taken),
        "said": last,
        "ok": done.returncode == 0 and reached == steps,
    }


def _metrics(file: Path) -> Sequence[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "seconds" in row]
