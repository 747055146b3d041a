"""Measures what the demo of a family of videos teaches: `uv run tools/demo/measure_demo_motions.py
wan`, or ltx.

For each seed it runs the demo as it is, with more prompts, and judges the samples that the run
wrote before and after training. Every prompt is of a colour, shape and motion that no clip of the
demo shows together. A sample is right if the centre of its shape moved into the caption's direction
(the nearest of eight, over at least `LEAST` pixels), if its colour is nearest to the caption's, and
if its outline in the middle frame covers the caption's shape best, by an intersection over union
above `OVERLAP`. The judge is measured on generated clips first.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from demo_runs import measure, parser_of
from ditkit_core.data.media.clip import stored_images
from ditkit_core.data.media.synthetic import BACKGROUNDS, COLOURS, SHAPES
from ditkit_core.families.demo_motions import (
    CLIPS,
    DIRECTIONS,
    FPS,
    FRAMES,
    NEW,
    SIDE,
    UNSEEN,
    Scene,
    motion_caption,
    moving,
)

LEAST = 8.0
OVERLAP = 0.7
_EIGHT = ("right", NEW, "down", "down-left", "left", "up-left", "up", "up-right")
_DARK = np.array(BACKGROUNDS["dark"], dtype=np.float64)

Frames = UInt8[np.ndarray, "frames 64 64 3"] | Float[np.ndarray, "frames 64 64 3"]


class Look(NamedTuple):
    """What a prompt asks for, or what a sample shows."""

    colour: str
    shape: str
    direction: str


def centre(light: Float[np.ndarray, "64 64"]) -> Float[np.ndarray, "2"] | None:
    """Row and column of the shape in an image of distances from the background; None if there is
    none."""
    weight = np.clip(light - 40, 0, None)
    if weight.sum() < 1000:
        return None
    return np.array([(weight * place).sum() / weight.sum() for place in np.mgrid[:SIDE, :SIDE]])


def direction(light: Float[np.ndarray, "frames 64 64"]) -> str:
    """Where the shape moves, one of eight; empty if it hardly moves."""
    first, last = centre(light[:2].mean(0)), centre(light[-2:].mean(0))
    if first is None or last is None or math.hypot(*(last - first)) < LEAST:
        return ""
    down, right = last - first
    return _EIGHT[round(math.atan2(down, right) / (math.pi / 4)) % 8]


def outline(light: Float[np.ndarray, "64 64"], brightest: float) -> str:
    """The shape that covers the lit part of an image best; empty if none does well."""
    middle = centre(light)
    if middle is None:
        return ""
    lit, found = light > brightest / 2, {}
    for shape in SHAPES:
        for down in range(-6, 4):
            for right in range(-3, 4):
                scene = Scene(
                    colour="red",
                    shape=shape,
                    start=(middle[0] + down, middle[1] + right),
                    velocity=(0.0, 0.0),
                )
                there = scene.cover(SIDE, SIDE, range(1))[0] > 0.5
                found[shape] = max(
                    found.get(shape, 0.0), (there & lit).sum() / max(1, (there | lit).sum())
                )
    best = max(found, key=lambda shape: found[shape])
    return best if found[best] > OVERLAP else ""


def judge(frames: Frames) -> Look:
    """What a clip shows."""
    away = frames.astype(np.float64) - _DARK
    light = np.linalg.norm(away, axis=-1)
    middle = FRAMES // 2
    core = light[middle] > 0.6 * np.percentile(light[middle], 98)
    mean = away[middle][core].mean(0)
    colour = min(
        COLOURS, key=lambda name: float(np.square(np.array(COLOURS[name]) - _DARK - mean).sum())
    )
    return Look(colour, outline(light[middle], float(np.linalg.norm(mean))), direction(light))


def prompts() -> tuple[list[Look], list[Look]]:
    """The new motion, and known ones, with colours and shapes that no clip has in that motion."""
    shown = {clip.caption for clip in CLIPS}
    new = [Look(colour, shape, NEW) for colour, shape in map(str.split, UNSEEN)]
    known = [
        Look(colour, shape, way)
        for number, way in enumerate(DIRECTIONS)
        if way != NEW
        for colour, shape in [(list(COLOURS)[number], SHAPES[number % len(SHAPES)])]
    ]
    assert not shown & {motion_caption(*look) for look in (*new, *known)}
    return new, known


def rates(looks: Sequence[Look], samples: Sequence[Look]) -> dict[str, float]:
    """How many samples are right: in motion, colour, shape, and all three."""
    right = np.array(
        [
            [a == b for a, b in zip(look, sample, strict=True)]
            for look, sample in zip(looks, samples, strict=True)
        ]
    )
    colour, shape, motion = right.mean(0)
    return {"motion": motion, "colour": colour, "shape": shape, "all": right.all(1).mean()}


def judge_of_truth() -> dict[str, float]:
    """The judge on generated clips of every caption."""
    random = np.random.default_rng(5)
    looks = [
        Look(colour, shape, way) for way in DIRECTIONS for colour in COLOURS for shape in SHAPES
    ]
    clips = [
        moving(*look, random.uniform(-10, 10)).paint(SIDE, SIDE, range(FRAMES)) for look in looks
    ]
    return rates(looks, [judge(np.round(clip)) for clip in clips])


def samples_of(folder: Path, step: int) -> dict[str, list[Look]]:
    """What the samples of a step show, by prompt."""
    listed = json.loads((folder / "samples" / f"step-{step:06d}.json").read_text(encoding="utf-8"))[
        "samples"
    ]
    found: dict[str, list[Look]] = {}
    for sample in listed:
        frames = stored_images(folder / "samples" / sample["file"], frames=FRAMES, fps=FPS)
        found.setdefault(sample["prompt"], []).append(
            judge(np.stack([np.asarray(frame) for frame in frames]))
        )
    return found


def rows(folder: Path, seed: int) -> list[str]:
    """A row of the table for each kind of prompt and time."""
    steps = sorted(
        int(file.stem.removeprefix("step-")) for file in (folder / "samples").glob("step-*.json")
    )
    lines = []
    for kind, looks in zip(("new", "known"), prompts(), strict=True):
        for when, step in (("before", steps[0]), ("after", steps[-1])):
            shown = samples_of(folder, step)
            pairs = [(look, sample) for look in looks for sample in shown[motion_caption(*look)]]
            rate = rates([look for look, _ in pairs], [sample for _, sample in pairs])
            cells = " | ".join(
                f"{100 * rate[name]:.0f} %" for name in ("motion", "colour", "shape", "all")
            )
            lines.append(f"| {seed} | {kind} | {when} | {len(pairs)} | {cells} |")
    return lines


def head() -> str:
    """The judge's own rates, and the table's head."""
    rates_of_truth = ", ".join(
        f"{name} {100 * rate:.0f} %" for name, rate in judge_of_truth().items()
    )
    return f"""The judge on generated clips: {rates_of_truth}

| seed | motion | samples | number | motion right | colour right | shape right | all right |
|---|---|---|---:|---:|---:|---:|---:|"""


def main() -> None:
    parser = parser_of(str(__doc__))
    parser.add_argument("family", choices=("ltx", "wan"))
    options, flags = parser.parse_known_args()
    texts = [motion_caption(*look) for looks in prompts() for look in looks]
    measure((options, flags), options.family, texts, head, rows)


if __name__ == "__main__":
    main()
