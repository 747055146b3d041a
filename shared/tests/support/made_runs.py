"""Folders of runs as training leaves them, for the tests of the report."""

import json
import math
import random
from pathlib import Path

from media_files import numbered_video, picture

from ditkit_core.config.toml import to_toml
from ditkit_core.io.run_dir import RunFolder
from ditkit_core.run.config import RunConfig

HOSTILE = (
    "</script><script>document.title = 'owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'"><svg onload=alert(1)>',
    "a & b &lt; c 'd' `e` ]]> <!-- -->",
    "<style>*{display:none}</style>\x00\x1b[31m\u202edrawkcab",
    "猫が走る 🐈 \ud800 half a character",
)
"""Captions that would be markup, scripts, or no text at all."""

SIGMAS = (0.1, 0.5, 0.9)


def write_run(
    folder: Path, steps: int = 40, *, captions: tuple[str, ...] = ("a cat", "a dog"), clips: int = 3
) -> Path:
    """A run of so many steps, measured every 5th, sampled at the first and the last."""
    rng = random.Random(steps)
    rows: list[dict[str, float | str]] = []
    for step in range(steps + 1):
        if step:
            rows.append(_trained(step, rng))
        if step % 5 == 0:
            rows.append(_measured(step, clips, rng))
        if step % 20 == 1:
            rows.append(_watched(step, captions[0]))
    folder.mkdir(parents=True, exist_ok=True)
    run = RunFolder(folder)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.config_file.write_text(to_toml(RunConfig()), encoding="utf-8")
    about = {
        "environments": [{"since": "2026-01-01", "devices": "cpu", "torch": "2.11",
        "CPU threads": "1 of 2"}],
        "model": {"family": "toy", "preset": "tiny", "trained_parameters": 12_345},
        "data": {
            "samples": 7, "captions": 9, "fps": 16.0, "held_out": [captions[0]],
            "num_excluded": len(captions),
            "shapes": [{"frames": 17, "height": 64, "width": 96, "samples": 7}],
            "excluded": [{"file": caption,
            "reason": f"damaged: {caption}"} for caption in captions],
        },
    }  # fmt: skip
    run.about.write_text(json.dumps(about))
    for step in (0, steps):
        write_samples(run.samples, step, captions)
    return folder


def write_samples(
    folder: Path, step: int, captions: tuple[str, ...], *, name: str = "", suffix: str = ".mp4"
) -> None:
    """The samples of a step, or under another name, with their list."""
    name = name or f"step-{step:06d}"
    listed = [
        {"file": f"{name}-{i}{suffix}", "prompt": text, "seed": 0}
        for i, text in enumerate(captions)
    ]
    for each in listed:
        path = folder / str(each["file"])
        if suffix == ".mp4":
            numbered_video(path, frames=4, size=(16, 32))
        else:
            picture(path, (32, 16), "teal")
    (folder / f"{name}.json").write_text(
        json.dumps({"samples": listed, "shown": f"{name}-sheet.png"})
    )


def _trained(step: int, rng: random.Random) -> dict[str, float | str]:
    return {
        "step": step, "loss": 1 / math.sqrt(step) + rng.random() / 3, "lr": 1e-4 * min(step / 10,
        1),
        "grad_norm": math.exp(rng.gauss(0, 1)), "seconds": 0.5 + rng.random() / 9,
        "tokens_per_second": 4000 * rng.random(), "peak_memory_bytes": 2**30 + step,
    }  # fmt: skip


def _watched(step: int, worst: str) -> dict[str, float | str]:
    return {
        "step": step, "grad_underflow": 0.25, "grad_underflow_worst": worst,
        "activation_max": 7.5 + step,
        "activation_max_block": 1, "activation_drift": 1 + step / 9, "nonfinite": 0,
    }  # fmt: skip


def _measured(step: int, clips: int, rng: random.Random) -> dict[str, float | str]:
    row: dict[str, float | str] = {"step": step}
    for name in ("held_out", *(f"held_out/sigma_{sigma:g}" for sigma in SIGMAS)):
        value = 1 + math.exp(-step / 20) + rng.random() / 20
        row[name] = value
        if step and clips > 1:
            row |= {f"{name}_low": value - 0.1, f"{name}_high": value + 0.1}
    return row
