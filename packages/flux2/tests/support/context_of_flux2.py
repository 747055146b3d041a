"""What the ranks do for `test_context.py`: text and image, with and without references."""

import sys
from dataclasses import replace

import torch
from flux2_items import Images

from ditkit_core.testing.context_steps import Subject, every, few, main


def items(*grids):
    """Images with these rows and columns, each with those of its references."""
    random = torch.Generator().manual_seed(0)
    names = ("latents", "reference.0", "reference.1")
    return [
        {name: torch.randn(6, 1, *grid, generator=random) for name, grid in zip(names, sample, strict=False)}
        | {"text": torch.randn(5, 12, generator=random)}
        for sample in grids
    ]


FOUR = replace(Images.arch, heads=4, dim=64)
SUBJECTS = {
    "even": Subject(Images.spec, FOUR, items([(4, 5)]), 3),
    "odd": Subject(Images.spec, FOUR, items([(3, 5)]), 3),
    "references": Subject(Images.spec, FOUR, items([(3, 5), (2, 3)], [(3, 5), (2, 3)]), 3),
    "ragged": Subject(Images.spec, FOUR, items(*Images.grids), 3),
    "two heads": Subject(Images.spec, Images.arch, items(*Images.grids), 3),
}
FEW, ALL = few(SUBJECTS), every(SUBJECTS, ("references", "ragged", "two heads"))

if __name__ == "__main__":
    main(SUBJECTS, ALL if "all" in sys.argv else FEW)
