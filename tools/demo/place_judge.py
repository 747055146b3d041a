"""The judge of demos that teach a place: what an image shows, and how many samples of a run are
right."""

import argparse
import json
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from demo_runs import measure
from ditkit_core.data.media.synthetic import BACKGROUNDS, COLOURS, SHAPES
from ditkit_core.families.demo_places import (
    HELD_OUT,
    IMAGES,
    KNOWN,
    NEW,
    PLACES,
    SIDE,
    DemoImage,
    paint_shapes,
    render,
)

LEAST_OVERLAP = 0.6
"""Intersection over union with the best template, below which an image shows no shape at any of the
places."""
_SHIFTS = [step * 2 / SIDE for step in range(-3, 4)]
"""Fractions of the side that a shape may be off its place."""

HEADINGS = (
    "| seed | place | training | samples | place right | colour right | shape right | all right |\n"
    "|---|---|---|---:|---:|---:|---:|---:|"
)


class Look(NamedTuple):
    """What a prompt asks for, or what a sample shows; empty parts are not recognised."""

    colour: str
    shape: str
    position: str

    @property
    def caption(self) -> str:
        return DemoImage(colour=self.colour, shape=self.shape, position=self.position).captions[0]


def _tensor(rgb: tuple[int, int, int]) -> Float[Tensor, "3"]:
    return torch.tensor(rgb, dtype=torch.float32)


@cache
def _templates() -> tuple[list[tuple[str, str]], Float[Tensor, "templates pixels"]]:
    """(shape, place) of each template, and how much of each pixel its shapes cover."""
    names, images = [], []
    for shape, place, down, right in product(SHAPES, PLACES, _SHIFTS, _SHIFTS):
        centres = [(row + down, column + right) for row, column in PLACES[place]]
        names.append((shape, place))
        images.append(paint_shapes(shape, "red", centres, SIDE, SIDE))
    return names, _cover(torch.from_numpy(np.stack(images)).flatten(1, 2).float(), "red")[0]


def _cover(pixels: Float[Tensor, "*images pixels 3"], colour: str) -> tuple[Tensor, Tensor]:
    """How much of each pixel a colour covers, and the square of what this leaves unexplained."""
    background = _tensor(BACKGROUNDS["dark"])
    direction = _tensor(COLOURS[colour]) - background
    cover = ((pixels - background) @ direction / direction.square().sum()).clamp(0, 1)
    return cover, (pixels - background - cover[..., None] * direction).square().sum((-2, -1))


def judge(pixels: Float[Tensor, "height width 3"]) -> Look:
    """What an image of `SIDE` x `SIDE` pixels in [0, 255] shows.

    The colour is the one that explains the image best as a mixture with the background. What it
    covers is compared with templates of every shape at every place, shifted by up to 6 pixels, by
    intersection over union.
    """
    covers = {colour: _cover(pixels.flatten(0, 1), colour) for colour in COLOURS}
    colour = min(covers, key=lambda name: float(covers[name][1]))
    cover, (names, templates) = covers[colour][0], _templates()
    overlaps = torch.minimum(templates, cover).sum(1) / torch.maximum(templates, cover).sum(1)
    return Look(
        colour, *(names[int(overlaps.argmax())] if overlaps.max() >= LEAST_OVERLAP else ("", ""))
    )


def row(
    seed: object, place: str, training: str, wanted: Sequence[Look], shown: Sequence[Look]
) -> str:
    """A row of the table: how many samples are right in each part, and in all."""
    right = np.array(
        [[a == b for a, b in zip(*pair, strict=True)] for pair in zip(wanted, shown, strict=True)]
    )
    colour, shape, where = right.mean(0)
    cells = " | ".join(
        f"{100 * share:.0f} %" for share in (where, colour, shape, right.all(1).mean())
    )
    return f"| {seed} | {place} | {training} | {len(wanted)} | {cells} |"


def prompts() -> dict[str, list[Look]]:
    """The new place, and the known ones, each with colours and shapes that no image of the demo
    shows there."""
    shown = {caption for example in IMAGES for caption in example.captions}
    known = [Look(*look, place) for look, place in product(HELD_OUT, KNOWN)]
    new = [Look(*look, NEW) for look in HELD_OUT]
    assert not any(look.caption in shown for look in new)
    return {"new": new, "known": [look for look in known if look.caption not in shown][::2]}


def judge_of_truth() -> str:
    """The judge on generated images of everything, a little off their places and with noise."""
    random = np.random.default_rng(0)
    wanted = [Look(*parts) for parts in product(COLOURS, SHAPES, PLACES)]
    shown = []
    for look in wanted:
        image = render(DemoImage(**look._asdict(), shift=tuple(random.uniform(-0.04, 0.04, 2))))
        shown.append(judge(torch.from_numpy(image + random.normal(0, 8, image.shape)).float()))
    return row("generated images", "all", "-", wanted, shown)


def rows(folder: Path, seed: int) -> list[str]:
    """The rows of one run: each kind of place, before and after training."""
    files = sorted((folder / "samples").glob("step-*.json"))
    lines = []
    for (place, looks), (training, file) in product(
        prompts().items(), (("before", files[0]), ("after", files[-1]))
    ):
        asked = {look.caption: look for look in looks}
        samples = [
            each
            for each in json.loads(file.read_text(encoding="utf-8"))["samples"]
            if each["prompt"] in asked
        ]
        images = [np.array(Image.open(folder / "samples" / each["file"])) for each in samples]
        shown = [judge(torch.from_numpy(image).float()) for image in images]
        lines.append(row(seed, place, training, [asked[each["prompt"]] for each in samples], shown))
    return lines


def measure_places(family: str, given: tuple[argparse.Namespace, list[str]]) -> None:
    """Measure a family's demo; `given` as for `measure`."""
    texts = [look.caption for looks in prompts().values() for look in looks]
    measure(given, family, texts, lambda: f"{HEADINGS}\n{judge_of_truth()}", rows)
