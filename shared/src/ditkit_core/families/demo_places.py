"""Images of a demo that teaches a place: simple shapes with exact captions, at places that a base
knows and at one that it does not.

A base was trained on such images (tools/demo/train_demo_base_*.py), with one shape at one of the
`KNOWN` places. It has never seen the `NEW` one.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from ditkit_core.data.media.synthetic import COLOURS, SHAPES, paint
from ditkit_core.io.files import write_text

SIDE = 64
"""Pixels on a side of the square images that the checkpoint was trained on."""
_RADII = {"circle": 11.0, "square": 10.0, "triangle": 7.5}
"""In an image of that size; a triangle is as high and as wide as three of its radii."""
_NEAR, _MIDDLE, _FAR = 0.27, 0.5, 0.73
PLACES = {
    "on the left": ((_MIDDLE, _NEAR),),
    "on the right": ((_MIDDLE, _FAR),),
    "at the top": ((_NEAR, _MIDDLE),),
    "at the bottom": ((_FAR, _MIDDLE),),
    "on both sides": ((_MIDDLE, _NEAR), (_MIDDLE, _FAR)),
}
"""Centres of the shapes, as fractions of height and width."""
*KNOWN, NEW = PLACES


@dataclass(frozen=True, kw_only=True)
class DemoImage:
    """The content of one image."""

    colour: str
    shape: str
    position: str
    """One of `PLACES`."""
    height: int = SIDE
    width: int = SIDE
    shift: tuple[float, float] = (0.0, 0.0)
    """How far the shapes are off their place, down and right, as fractions of height and width."""

    @property
    def captions(self) -> tuple[str, str]:
        """Two sentences that describe the image."""
        return (
            f"a {self.colour} {self.shape} {self.position}",
            f"a {self.shape} in {self.colour} {self.position}",
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


HELD_OUT = (("red", "triangle"), ("green", "circle"), ("blue", "square"), ("yellow", "circle"))
"""Colours and shapes that no image of the dataset shows at the new place."""

LOOKS = tuple(product(COLOURS, SHAPES))
_SIZES = ((64, 64), (128, 128), (48, 80), (64, 64), (96, 160), (80, 48), (160, 96))
"""(height, width): squares, and landscape and portrait of about 8:5."""
_SHIFTS = (
    (0.0, 0.0),
    (-0.03, 0.0),
    (0.03, -0.03),
    (0.03, 0.0),
    (-0.03, -0.03),
    (-0.03, 0.03),
    (0.0, 0.03),
)
"""With these, no two images look nearly alike to the doctor."""


def demo_image(
    index: int, look: tuple[str, str], position: str, size: tuple[int, int]
) -> DemoImage:
    """The image of a look, which is a colour and a shape, with the shift of an index; `size` is its
    height and width."""
    (colour, shape), (height, width), shift = look, size, _SHIFTS[index % len(_SHIFTS)]
    return DemoImage(
        colour=colour, shape=shape, position=position, height=height, width=width, shift=shift
    )


def _described(index: int, image: DemoImage) -> Example:
    captions = image.captions if index % 3 == 0 else image.captions[:1]
    return Example(
        file=f"picture{index:02d}.{'jpg' if index % 2 else 'png'}", image=image, captions=captions
    )


_TAUGHT = [look for look in LOOKS if look not in HELD_OUT]
_IMAGES = (
    *(demo_image(i, look, NEW, _SIZES[i // 2 % 2]) for i, look in enumerate(_TAUGHT + _TAUGHT[:4])),
    *(demo_image(i, look, KNOWN[i % 4], _SIZES[i % 7]) for i, look in enumerate(LOOKS)),
)
"""The new place twelve times, and the known ones as often: without them, the adapter would put
every shape at the new place."""

VALIDATED = {
    number: demo_image(i, _TAUGHT[i % len(_TAUGHT)], NEW, _SIZES[i // 2 % 2])
    for i, number in enumerate((52, 57, 73, 85, 88, 93), start=12)
}
"""Six more of the new place, by the number in their names. Held-out images are chosen by a hash of
their names: of the nine that demo.toml keeps for validation, these six and two others show the new
place. Fewer could not show that the loss fell beyond chance."""

IMAGES = tuple(
    _described(index, image) for index, image in (*enumerate(_IMAGES), *VALIDATED.items())
)
"""Captioned images, some with two captions."""
CAPTIONS = tuple(
    caption
    for (colour, shape), position in product(LOOKS, PLACES)
    for caption in DemoImage(colour=colour, shape=shape, position=position).captions
)
"""Both captions of every shape in every colour at every place."""


def paint_shapes(
    shape: str, colour: str, centres: Sequence[tuple[float, float]], height: int, width: int
) -> UInt8[np.ndarray, "{height} {width} 3"]:
    """Shapes of one kind on a dark background, with soft edges, which a small VAE can reproduce.

    Args:
        shape: One of `SHAPES`.
        colour: One of `COLOURS`.
        centres: Of each shape, as fractions of height and width.
        height: Pixels.
        width: Pixels.
    """
    from PIL import Image, ImageFilter

    unit = math.sqrt(height * width) / SIDE
    radius = unit * _RADII[shape]
    # paint's triangle reaches two radii up and one down
    down = radius / 2 if shape == "triangle" else 0
    painted = partial(
        paint, height, width, shape=shape, colour=colour, background="dark", radius=radius
    )
    layers = [painted(centre=(row * height + down, column * width)) for row, column in centres]
    # the background is darker than every shape in every channel
    brightest = np.maximum.reduce(layers)
    return np.array(Image.fromarray(brightest).filter(ImageFilter.GaussianBlur(unit)))


def render(image: DemoImage) -> UInt8[np.ndarray, "height width 3"]:
    """The pixels of an image."""
    down, right = image.shift
    centres = [(row + down, column + right) for row, column in PLACES[image.position]]
    return paint_shapes(image.shape, image.colour, centres, image.height, image.width)


def write_dataset(folder: Path, examples: Sequence[Example] = IMAGES) -> None:
    """Write the images of examples, and the metadata.jsonl that lists them."""
    lines = []
    for example in examples:
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
