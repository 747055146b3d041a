"""Images of a demo of a model that edits: what `demo_places` has, and pairs of images with the
instruction that edits one into the other."""

from dataclasses import replace

from ditkit_core.families.demo_places import IMAGES, SIDE, DemoImage, Example, demo_image


def edited(image: DemoImage, part: str, value: str) -> tuple[DemoImage, str]:
    """The image with another colour or shape, and the instruction for it."""
    instruction = "make the {} {} {}" if part == "colour" else "turn the {} {} into a {}"
    changed = replace(image, colour=value) if part == "colour" else replace(image, shape=value)
    return changed, instruction.format(image.colour, image.shape, value)


def _pair(index: int, look: tuple[str, str], position: str, part: str, value: str) -> Example:
    # a reference must have 64 pixels on each side
    before = demo_image(index, look, position, (SIDE, SIDE))
    after, instruction = edited(before, part, value)
    references = ((f"references/edit{index:02d}.png", before),)
    return Example(
        file=f"edit{index:02d}.png", image=after, captions=(instruction,), references=references
    )


_EDITS = (
    (("red", "circle"), "on the left", "colour", "blue"),
    (("green", "square"), "at the top", "colour", "yellow"),
    (("blue", "triangle"), "on the right", "colour", "red"),
    (("yellow", "circle"), "at the bottom", "shape", "square"),
    (("red", "square"), "at the top", "shape", "triangle"),
    (("green", "circle"), "on the right", "colour", "blue"),
)
"""(colour and shape, place, what changes, to what)."""

EXAMPLES = (*IMAGES, *(_pair(index, *edit) for index, edit in enumerate(_EDITS)))
"""Captioned images, and pairs for editing."""
