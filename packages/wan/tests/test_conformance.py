"""Wan against the checks that every model passes."""

from wan_items import SIZES, Clips, Images

from ditkit_core.testing.conformance import Conformance, CoreChecks
from ditkit_wan.presets import WanArch


class TestWan(Clips, Conformance):
    """Text to video."""


class TestImageToVideo(Images, Conformance):
    one_in = 23
    slow = True


class TestFirstAndLastFrame(Images, CoreChecks):
    """Only the embedding differs, which levers do not see."""

    one_in = 23
    arch = WanArch(**SIZES, in_channels=10, image_dim=14, image_positions=7)


class TestTextImageToVideo(Clips, Conformance):
    """Every other sample begins with a clean frame."""

    one_in = 23
    arch = WanArch(**SIZES, in_channels=4, token_times=True)

    def sizes(self, index, grid):
        return super().sizes(index, grid) | ({} if index % 2 else {"first_frame": (4, 1, *grid)})


class TestVace(Clips, Conformance):
    """A stream next to the main one."""

    one_in = 23
    arch = WanArch(**SIZES | {"layers": 3}, in_channels=4, vace_layers=(0, 1), vace_channels=7)
    last_layers = ("ffn.2", "after_proj")
    added_as_they_are = ("after_proj",)
    num_streams = 2

    def sizes(self, index, grid):
        return super().sizes(index, grid) | {"vace": (7, 2, *grid)}
