"""Zed against the suites of the core. Run it after each step: it says which promise broke, its usual cause, and where the guide explains it."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from ditkit_zed.presets import PRESETS, ZedArch
from ditkit_zed.spec import ZED
from ditkit_zed.verify import DIFFUSERS

from ditkit_core.models.precision import Precision
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.conformance_diffusers import DiffusersChecks
from ditkit_core.testing.demo import Demo
from ditkit_core.testing.filled_in import next_step
from ditkit_core.testing.suites import EverySuite

SOURCE = Path(__file__).parents[1] / "src" / "ditkit_zed"


class TestZed(EverySuite):
    spec = ZED
    # FILL IN 2: a tiny architecture with two blocks of each kind; its widths are multiples of 16.
    arch = ZedArch(dim=64, heads=2, in_channels=4, text_dim=12)
    # FILL IN 2: the layers whose result ends a block.
    last_layers = ("ffn.2",)
    # several blocks, for checks that stream and plan them
    deeper = replace(arch, layers=6)

    def items(self, count, ragged=False):
        random = torch.Generator().manual_seed(0)
        grids = [(4, 6), (4, 10), (6, 4)] if ragged else [(4, 6)]
        return [
            {
                "latents": torch.randn(4, LATENT_FRAMES, *grids[i % len(grids)], generator=random),
                "text": torch.randn(3 + i % 2 if ragged else 3, 12, generator=random),
            }
            for i in range(count)
        ]


@pytest.mark.skip(reason="FILL IN 7: take this line out once verify.py names diffusers' classes")
class TestDiffusers(DiffusersChecks):
    spec = ZED
    arch = TestZed.arch
    items = TestZed.items
    diffusers = DIFFUSERS
    parameters: ClassVar = {"two-blocks": NUM_PARAMETERS}
    targets = ZED.adapters.targets


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo.write(ZED, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = ZED
    samples = "*.SUFFIX"
    num_samples = range(1, 100)
    trained = "diffusion_model.blocks.0.self_attn.q.lora_A.weight"
    trained_names = r"diffusion_model\.blocks\."
    forms = ()
    init_from = "first.safetensors"


def test_parameters_of_each_preset_are_counted():
    """FILL IN 1: the number of parameters of the published models, as their authors or diffusers count them."""
    counted = {name: sum(p.numel() for p in model(name).parameters()) for name in PRESETS}
    assert counted == {"two-blocks": NUM_PARAMETERS}


def model(preset):
    with torch.device("meta"):
        return ZED.architecture.build(PRESETS[preset], Precision())


def test_what_is_to_be_filled_in_next():
    """Never fails: it prints the next place that is still marked, in order of work."""
    print(next_step(SOURCE.parents[1]))
