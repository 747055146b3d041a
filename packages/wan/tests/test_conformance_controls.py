"""WanToDance, a reference in front and a camera's path pass every check of the seam: split,
policies, swap, offload, quantization, precision.

What their reviewers asked for: every parameter besides the blocks placed, music carried between
devices, two heads, nothing sent twice.
"""

import torch

from ditkit_core.testing.conformance import Conformance, CoreChecks
from ditkit_core.testing.conformance_split import SplitChecks
from ditkit_wan.conditioning.camera import moving, path_of
from ditkit_wan.presets import MusicArch, WanArch
from ditkit_wan.spec import WAN

SIZES = {
    "dim": 48,
    "ffn_dim": 64,
    "heads": 2,
    "layers": 2,
    "out_channels": 4,
    "text_dim": 20,
    "text_tokens": 6,
    "freq_dim": 16,
}


class _Items:
    """Clips of two latent frames; the grids of ragged ones are all of whole groups that hear
    music."""

    spec = WAN
    one_in = 23
    last_layers = ("ffn.2",)

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = [(4, 8), (4, 16), (8, 4)] if ragged else [(4, 8)]
        return [self.item(i, (2, *grids[i % len(grids)]), random) for i in range(count)]

    def item(self, number, size, random):
        """An item of this size: what all of them have."""
        arch = self.arch
        return {
            "latents": torch.randn(4, *size, generator=random),
            "y": torch.randn(arch.in_channels - 4, *size, generator=random),
            "text": torch.randn(3 + number, 20, generator=random),
            "image": torch.randn(5, arch.image_dim, generator=random),
        }


class TestReferenceInFront(_Items, Conformance):
    slow = True
    arch = WanArch(**SIZES, in_channels=8, image_dim=8, ref_conv=True)

    def item(self, number, size, random):
        return super().item(number, size, random) | {
            "reference": torch.randn(16, 1, *size[1:], generator=random)
        }


class TestCamera(_Items, CoreChecks, SplitChecks):
    """Only the embedding differs, which levers do not see: what a step gives under a division and
    under policies is asked nightly, what crosses a boundary and what a batch gives daily."""

    nightly = (
        *CoreChecks.nightly,
        "test_no_layout_changes_a_number_of_training",
        "test_no_policy_changes_a_bit",
        "test_a_policy_holds_what_it_says",
    )
    arch = WanArch(**SIZES, in_channels=8, image_dim=8, camera_channels=24)

    def item(self, number, size, random):
        _, height, width = size
        poses = moving(("Left", "UpIn", "Right")[number % 3], "0.3", 5)
        return super().item(number, size, random) | {
            "camera_path": path_of(poses, height=8 * height, width=8 * width)
        }


class TestWanToDance(_Items, Conformance):
    """Drawn between keyframes; the second of two ragged clips is of keyframes, which have another
    embedding and another head."""

    slow = True
    arch = WanArch(
        **SIZES, in_channels=8, image_dim=8, ref_conv=True,
        music=MusicArch(layers=(0,), features=5, width=8, heads=2, ffn_dim=12, skipped=1),
    )  # fmt: skip
    head_norms = 2
    idle = (
        "embed.ref_conv.", "embed.patch_embedding", "head.",
        *(f"layers.0.music.{part}." for part in ("q", "k", "norm_q", "norm_k")),
    )  # fmt: skip

    def item(self, number, size, random):
        rows = 5 * (1 + 3 * (number % 2))
        return super().item(number, size, random) | {
            "music": torch.randn(rows + number, 5, generator=random),
            "refimage": torch.randn(5, self.arch.image_dim, generator=random),
        }
