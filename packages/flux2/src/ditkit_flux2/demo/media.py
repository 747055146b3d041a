"""The demo's images: simple shapes with exact captions, and pairs of images with the instruction that edits one into the other."""

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from ditkit_core.data.media.synthetic import BACKGROUNDS, COLOURS, SHAPES, paint
from ditkit_core.io.files import write_text


@dataclass(frozen=True, kw_only=True)
class DemoImage:
    """The content of one image."""

    colour: str
    shape: str
    background: str
    place: tuple[float, float]
    """The shape's centre, as fractions of height and width."""
    height: int
    width: int

    @property
    def captions(self) -> tuple[str, str]:
        """Two sentences that describe the image."""
        return (
            f"a {self.colour} {self.shape} on a {self.background} background",
            f"a {self.background} picture of a {self.shape} in {self.colour}",
        )


@dataclass(frozen=True, kw_only=True)
class Example:
    """One line of the dataset."""

    file: str
    """Path relative to the dataset's folder; its suffix gives the image format."""
    image: DemoImage
    captions: tuple[str, ...]
    references: tuple[tuple[str, DemoImage], ...] = ()
    """(path, image) of the images to edit."""


def _image(look: str, height: int, width: int, down: float = 0.5, right: float = 0.5) -> DemoImage:
    colour, shape, background = look.split()
    return DemoImage(colour=colour, shape=shape, background=background, place=(down, right), height=height, width=width)


_SIZES = ((128, 128), (96, 160), (160, 96), (112, 176), (144, 144), (192, 120), (96, 96))
"""(height, width): squares, and landscape and portrait of about 8:5."""

_PLACES = ((0.5, 0.5), (0.5, 0.35), (0.35, 0.5), (0.6, 0.6), (0.4, 0.4))

_IMAGES = tuple(
    _image(f"{colour} {shape} {background}", *_SIZES[index % len(_SIZES)], *_PLACES[index % len(_PLACES)])
    for index, (colour, shape, background) in enumerate(product(COLOURS, SHAPES, BACKGROUNDS))
)
"""Every combination of colour, shape and background once."""

_EDITS = (
    (_image("red circle dark", 128, 128, right=0.4), "colour", "blue"),
    (_image("green square bright", 96, 160, right=0.6), "colour", "yellow"),
    (_image("blue triangle dark", 128, 128, down=0.6), "colour", "red"),
    (_image("yellow circle bright", 160, 96, down=0.4), "shape", "square"),
    (_image("red square dark", 112, 112), "shape", "triangle"),
    (_image("green circle dark", 96, 144, right=0.3), "background", "bright"),
)
"""(before, what changes, to what)."""


def _described(index: int, image: DemoImage) -> Example:
    captions = image.captions if index % 3 == 0 else image.captions[:1]
    return Example(file=f"picture{index:02d}.{'jpg' if index % 2 else 'png'}", image=image, captions=captions)


def _edited(index: int, before: DemoImage, part: str, value: str) -> Example:
    where = "background" if part == "background" else f"{before.colour} {before.shape}"
    after = {"colour": replace(before, colour=value), "shape": replace(before, shape=value)}
    return Example(
        file=f"edit{index:02d}.png",
        image=after.get(part, replace(before, background=value)),
        captions=(f"turn the {where} into a {value}" if part == "shape" else f"make the {where} {value}",),
        references=((f"references/edit{index:02d}.png", before),),
    )


EXAMPLES = (
    *(_described(index, image) for index, image in enumerate(_IMAGES)),
    *(_edited(index, *edit) for index, edit in enumerate(_EDITS)),
)
"""Thirty lines: captioned images, some with two captions, and pairs for editing."""


def render(image: DemoImage) -> UInt8[np.ndarray, "height width 3"]:
    """The pixels of an image."""
    return paint(
        image.height,
        image.width,
        shape=image.shape,
        colour=image.colour,
        background=image.background,
        centre=(image.place[0] * image.height, image.place[1] * image.width),
        radius=0.27 * min(image.height, image.width),
    )


def write_dataset(folder: Path) -> None:
    """Write all images, and the metadata.jsonl that lists them."""
    lines = []
    for example in EXAMPLES:
        for name, image in ((example.file, example.image), *example.references):
            _write(folder / name, image)
        row: dict[str, object] = {"file_name": example.file, "text": example.captions}
        if example.references:
            row["references"] = [name for name, _ in example.references]
        lines.append(json.dumps(row) + "\n")
    write_text(folder / "metadata.jsonl", "".join(lines))


def _write(path: Path, image: DemoImage) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"format": "PNG"} if path.suffix == ".png" else {"format": "JPEG", "quality": 95}
    Image.fromarray(render(image)).save(path, **options)
