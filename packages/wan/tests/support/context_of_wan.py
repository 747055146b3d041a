"""What the ranks do for `test_context.py`: every variant whose tokens ranks can share."""

import sys
from dataclasses import replace

import torch
from wan_items import SIZES

from ditkit_core.testing.context_steps import Subject, every, few, main
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

FOUR = SIZES | {"heads": 4}


def items(*grids, **more):
    """Clips of these frames, rows and columns of latents; `more` are channels of conditions of the same size."""
    random = torch.Generator().manual_seed(0)

    def item(index, grid):
        sizes = {"latents": (4, *grid), "text": (3 + index, 20)} | {name: (num, *grid) for name, num in more.items()}
        return {name: torch.randn(size, generator=random) for name, size in sizes.items()}

    return [item(index, grid) for index, grid in enumerate(grids)]


def clean_first(clips):
    """Every other clip with a given first frame."""
    return [clip | ({} if i % 2 else {"first_frame": clip["latents"][:, :1].clone()}) for i, clip in enumerate(clips)]


def with_reference(clips):
    return [clip | {"reference": torch.ones(16, 1, *clip["latents"].shape[2:])} for clip in clips]


def time_of_each_token(noised, sigma, given, guidance):
    inputs = WAN.training.make_inputs(noised, sigma, given, guidance)
    tokens = max(latents[0].numel() // 4 for latents in inputs.latents)
    return inputs._replace(timestep=inputs.timestep[:, None] * torch.linspace(0.5, 1, tokens))


EVEN, ODD, RAGGED = [(4, 4, 6)], [(3, 6, 6)], [(3, 6, 6), (2, 4, 10), (4, 4, 6)]
TIMES = replace(WAN, training=replace(WAN.training, make_inputs=time_of_each_token))
SUBJECTS = {
    "even": Subject(WAN, WanArch(**FOUR, in_channels=4), items(*EVEN), 2),
    "odd": Subject(WAN, WanArch(**FOUR, in_channels=4), items(*ODD), 2),
    "ragged": Subject(WAN, WanArch(**FOUR, in_channels=4), items(*RAGGED), 2),
    "two heads": Subject(WAN, WanArch(**SIZES, in_channels=4), items(*RAGGED), 2),
    "clean first frame": Subject(
        WAN, WanArch(**FOUR, in_channels=4, token_times=True), clean_first(items(*RAGGED)), 2, gathers=2
    ),
    "time of each token": Subject(TIMES, WanArch(**FOUR, in_channels=4, token_times=True), items(*RAGGED), 2),
    "image": Subject(
        WAN, WanArch(**FOUR, in_channels=10, image_dim=14),
        [clip | {"image": torch.ones(7, 14)} for clip in items(*ODD, y=6)], 2,
    ),
    "vace": Subject(
        WAN, WanArch(**FOUR | {"layers": 3}, in_channels=4, vace_layers=(0, 1), vace_channels=7),
        items(*RAGGED, vace=7), 5,
    ),
    "reference": Subject(WAN, WanArch(**FOUR, in_channels=4, ref_conv=True), with_reference(items(*RAGGED)), 2),
}  # fmt: skip
FEW, ALL = few(SUBJECTS), every(SUBJECTS, ("ragged", "two heads", "vace"))

if __name__ == "__main__":
    main(SUBJECTS, ALL if "all" in sys.argv else FEW)
