"""Krea 2 against every suite of the core, and diffusers: outputs, every gradient, captions,
samples, adapters."""

import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.nn.rope import timestep_features
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.conformance_diffusers import (
    DiffusersChecks,
    check_steps,
    first_noise,
    sample_steps,
)
from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
from ditkit_core.testing.conformance_kernel_ranks import KernelRanksConformance
from ditkit_core.testing.conformance_plans import FullSizePlanConformance, KeptBytesConformance
from ditkit_core.testing.conformance_routing import RoutingChecks
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.demo import Demo, TrainedBaseChecks
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.run_files import RunFileChecks
from ditkit_core.testing.suites import EverySuite
from ditkit_core.testing.world import make_model
from ditkit_krea2.demo.write import write_checkpoint
from ditkit_krea2.encoders import PREFIX_TOKENS, TEXT, TEXT_TOKENS, VAE
from ditkit_krea2.presets import PRESETS, Krea2Arch
from ditkit_krea2.spec import KREA2
from ditkit_krea2.verify import DIFFUSERS

CPU = torch.device("cpu")
ARCH = Krea2Arch(
    dim=64, heads=4, kv_heads=2, layers=2, mlp_dim=128, freq_dim=32, in_channels=4, text_dim=32,
    text_layers=3, text_heads=2, text_kv_heads=1, text_mlp_dim=48, layerwise_blocks=1,
    refiner_blocks=1, axes=(4, 6, 6),
)  # fmt: skip
GRIDS, CAPTIONS = [(8, 10), (12, 14), (10, 8)], (20, 33, 20)
"""Latent pixels, and rows of captions, of three samples."""
WIDTH = ARCH.text_layers * ARCH.text_dim


def items(count: int, ragged: bool = False) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    sizes = [
        (GRIDS[i % 3 if ragged else 0], CAPTIONS[i % 3 if ragged else 0]) for i in range(count)
    ]
    return [
        {
            "latents": torch.randn(4, 1, *grid, generator=random),
            "text": torch.randn(rows, WIDTH, generator=random),
        }
        for grid, rows in sizes
    ]


class Images:
    spec = KREA2
    arch = ARCH

    def items(self, count, ragged=False):
        return items(count, ragged)


class TestKrea2(Images, EverySuite):
    last_layers = ("ff.down", "projector", "linear_2")
    added_as_they_are = (
        "Krea2LayerwiseBlock ff.down",
        "Krea2RefinerBlock ff.down",
        "projector",
        "linear_2",
    )
    deeper = replace(ARCH, layers=6)
    diffusers = DIFFUSERS


class TestDiffusers(Images, DiffusersChecks):
    diffusers = DIFFUSERS
    parameters: ClassVar = dict.fromkeys(PRESETS, 12_820_073_036)
    targets: ClassVar = {
        "every layer": (
            *KREA2.adapters.targets["blocks"],
            "embed.img_in",
            "embed.time_embed.linear_1",
            "embed.time_embed.linear_2",
            "embed.time_mod_proj",
            "collapse.projector",
            "txt_in.linear_1",
            "txt_in.linear_2",
            "head.linear",
        )
    }

    def exact(self, patch, dtype):
        from diffusers.models.transformers.transformer_krea2 import Krea2TimestepEmbedding

        def forward(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
            features = timestep_features(1000 * timestep.double(), self.embed_dim).to(dtype)
            hidden = torch.nn.functional.gelu(self.linear_1(features[:, None]), approximate="tanh")
            return self.linear_2(hidden)

        patch.setattr(Krea2TimestepEmbedding, "forward", forward)

    def index(self, arch):
        return {"is_distilled": arch.distilled}

    def is_loaded(self, kind, targets, alpha):
        return kind in ("official", "diffusers", "peft") and not alpha

    def test_official_tables_have_one_axis(self):
        official = self.in_form("official", dict(make_model(KREA2, ARCH).named_parameters()))
        assert official["blocks.0.mod.lin"].shape == (6 * ARCH.dim,)


# Captions, samples


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint; tests only read it."""
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder)
    return folder


def test_features_of_captions_are_those_of_the_pipeline(checkpoint):
    """The pipeline pads between caption and end of the template; ours is without padding. A caption
    that is too long keeps the end of the template in both."""
    from diffusers import Krea2Pipeline

    pipeline = Krea2Pipeline.from_pretrained(
        checkpoint, local_files_only=True, transformer=None, vae=None
    )
    encoder = KREA2.auxiliary.text_encoder(
        ModelPaths(base=str(checkpoint)), CPU, torch.float32, "never"
    )
    encoder.load()
    captions = ["a red circle", "", "a long one, " * 200]
    with torch.no_grad():
        features, masks = pipeline.encode_prompt(list(captions), device=CPU)
    for caption, padded, mask in zip(captions, features, masks, strict=True):
        (ours,) = encoder.encode([caption])
        expected = padded[mask]
        assert ours["text"].shape == (len(expected), 12 * 32) and len(expected) <= TEXT_TOKENS
        # fp32; kernels sum in another order
        torch.testing.assert_close(ours["text"].view_as(expected), expected, rtol=1e-4, atol=1e-4)
    assert masks[2].all() and len(masks[2]) == TEXT_TOKENS
    assert TEXT.models[0].dropped == PREFIX_TOKENS == pipeline.prompt_template_encode_start_idx


@pytest.mark.parametrize(("kind", "guidance"), [("base", 5.5), ("base", 1.0), ("distilled", 5.5)])
def test_every_step_of_a_sample_is_that_of_the_pipeline(checkpoint, kind, guidance):
    """The pipeline counts guidance from 0; the distilled model has none, and a shift of its own."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline

    arch = replace(ARCH, in_channels=16, distilled=kind == "distilled")
    model, random = make_model(KREA2, arch).eval(), torch.Generator().manual_seed(2)
    prompt, negative = ({"text": torch.randn(rows, WIDTH, generator=random)} for rows in (40, 5))
    defaults = KREA2.auxiliary.sample_defaults(arch)
    job = GenerationRequest(
        conditions=prompt, negative=negative, frames=1, height=48, width=64, steps=3,
        guidance=guidance, shift=defaults.shift, seed=7,
    )  # fmt: skip
    ours = sample_steps(KREA2, model, ModelPaths(base=str(checkpoint)), job)
    calls = 2 if (kind, guidance) == ("base", 5.5) else 1
    vae = AutoencoderKLQwenImage.from_pretrained(checkpoint / "vae", local_files_only=True)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        checkpoint / "scheduler", local_files_only=True
    )
    pipeline = Krea2Pipeline(
        scheduler, vae, None, None, DIFFUSERS.transformer(model), is_distilled=arch.distilled
    )
    pipeline.set_progress_bar_config(disable=True)
    after: list[Tensor] = []

    def keep(pipeline, step, timestep, values):
        after.append(pipeline._unpack_latents(values["latents"], 48, 64)[0])
        return values

    noise = first_noise(job, (16, 1, 6, 8))
    packed = pipeline._pack_latents(noise[:, 0][None], 1, 16, 6, 8)
    padded = torch.nn.functional.pad(negative["text"], (0, 0, 0, 35))  # equally long, and masked
    features, other = (
        rows[None].unflatten(-1, (ARCH.text_layers, -1)) for rows in (prompt["text"], padded)
    )
    image = pipeline(
        prompt_embeds=features, prompt_embeds_mask=torch.ones(1, 40, dtype=torch.bool),
        negative_prompt_embeds=other, negative_prompt_embeds_mask=torch.arange(40)[None] < 5,
        height=48, width=64, num_inference_steps=3,
        guidance_scale=guidance - 1 if kind == "base" else 0.0, latents=packed,
        callback_on_step_end=keep, output_type="pt",
    ).images[0]  # fmt: skip
    assert len(after) == 3
    check_steps(ours, after, calls=calls)
    pixels = ours.sampler.decoder.decode(ours.latents)[:, 0]
    torch.testing.assert_close(pixels, image, atol=2e-4, rtol=0)


class TestRunFiles(RunFileChecks):
    spec = KREA2
    folder = Path(__file__).parents[1] / "configs"
    count = 2

    def check(self, config):
        """The base is trained, and its guidance needs the empty caption."""
        assert config.model.preset != "distilled" and config.train.caption_dropout == 0.1


def test_the_distilled_model_is_advised_against_and_the_base_is_not():
    assert 'model.preset = "base"' in KREA2.training.advice(PRESETS["distilled"])
    assert KREA2.training.advice(PRESETS["base"]) == ""
    distilled, base = map(KREA2.auxiliary.sample_defaults, (PRESETS["distilled"], PRESETS["base"]))
    assert (distilled.steps, distilled.guided_by) == (8, "nothing")
    assert math.isclose(math.log(distilled.shift), 1.15) and base.shift == 0
    assert (base.steps, base.guidance) == (28, 5.5)
    for config, defaults, shift in (
        (SampleConfig(), distilled, distilled.shift),
        (SampleConfig(shift=2.0), distilled, 2.0),
        (SampleConfig(), base, 0),
    ):
        assert config.resolved(defaults, print).shift == shift


class TestRoutedText(Images, RoutingChecks):
    """With two blocks of each kind before the join."""

    arch = replace(ARCH, layerwise_blocks=2, refiner_blocks=2)


class TestKeptBytes(KeptBytesConformance):
    spec = KREA2
    arch = replace(ARCH, layers=3)
    size = (1, 256, 256)
    wider: ClassVar = {"dim": 512, "axes": (32, 48, 48), "mlp_dim": 1024}
    larger = (1, 512, 512)
    daily = (pytest.param("attn_only, 5-7=full", marks=pytest.mark.slow),)
    # On either side of the join, which has no parameters, and on both.
    nightly = ("none", "full", "attn_only", "attn_only, 1-3=full", "attn_only, 4-6=full")


class TestPlan(FullSizePlanConformance):
    spec = KREA2
    preset = "base"
    size = (1, 1024, 1024)
    cut = 18


class TestSplit(FullSizeSplitConformance):
    spec = KREA2
    preset = "base"
    size = (1, 1024, 1024)
    few: ClassVar = {"layers": 2}
    all_blocks = ("full", 3)
    most_apart = 1.1 * 2 * 434e6  # no more than a block

    def crossing(self, arch, cut):
        """Two streams, time, modulation, rotary table; behind the join one stream. One image has no
        masks. Adapters are behind the caption, then behind both."""
        return (5 if cut <= arch.layerwise_blocks + arch.refiner_blocks + 2 else 4), 1


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo.write(KREA2, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = KREA2
    num_samples = range(1, 100)
    trained = "diffusion_model.blocks.0.attn.wq.lora_A.weight"
    trained_names = r"diffusion_model\.(blocks|txtfusion)\."


class TestBase(TrainedBaseChecks):
    spec = KREA2
    vae = VAE
    text_encoder = "Qwen3VLModel"
    layers = (2, 35)


@pytest.mark.slow  # minutes
def test_kernels_compute_what_torch_computes_under_every_policy():
    check_kernels(TestKrea2)


# and not with those of ranks, which each change waits for: the interpreter takes minutes
@pytest.mark.slow
class TestKernelRanks(Images, KernelRanksConformance):
    """A block of each kind, and images of a few tokens."""

    arch = replace(ARCH, layers=1)
    cases = ("brief lora on nf4", "brief full")
    more = ("gated_sum", "gated_sum_backward")
    without = ("affine_norm", "affine_norm_backward")


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextConformance):
    """Ranks that share the tokens of each sample: text before the join by itself."""

    four: ClassVar = replace(ARCH, layers=1, text_heads=4, text_kv_heads=2)
    two: ClassVar = replace(ARCH, layers=1, heads=2, kv_heads=1, axes=(8, 12, 12))
    subjects: ClassVar = {
        "odd": Subject(KREA2, four, items(1), 2),
        "ragged": Subject(KREA2, four, items(3, ragged=True), 2),
        "two heads": Subject(KREA2, two, items(2, ragged=True), 2),
    }


@pytest.mark.exhaustive
class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_krea2.train"
