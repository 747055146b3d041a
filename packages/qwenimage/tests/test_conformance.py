"""Qwen-Image against every suite of the core, and diffusers: outputs, every gradient, captions,
samples, adapters."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.families.language_models import QWEN2_5_VL_TOWER
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.encoders import WHOLE, GenerationRequest, Prompt
from ditkit_core.models.paths import ModelPaths
from ditkit_core.nn.rope import timestep_features
from ditkit_core.testing.conformance import CoreChecks
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.conformance_diffusers import (
    Comparison,
    DiffusersChecks,
    check_steps,
    first_noise,
    sample_steps,
)
from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
from ditkit_core.testing.conformance_kernel_ranks import KernelRanksConformance
from ditkit_core.testing.conformance_plans import FullSizePlanConformance, KeptBytesConformance
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.demo import Demo, TrainedBaseChecks
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.run_files import RunFileChecks
from ditkit_core.testing.suites import EverySuite
from ditkit_core.testing.world import make_model
from ditkit_qwenimage.demo.write import write_checkpoint
from ditkit_qwenimage.encoders import PREFIX_TOKENS, TEXT, TEXT_TOKENS, VAE
from ditkit_qwenimage.model import Grid
from ditkit_qwenimage.presets import PRESETS, TASKS, QwenImageArch, arch_from_config, config_of
from ditkit_qwenimage.spec import QWENIMAGE
from ditkit_qwenimage.state_dict import to_native
from ditkit_qwenimage.verify import DIFFUSERS

CPU = torch.device("cpu")
ARCH = QwenImageArch(dim=64, heads=2, layers=2, in_channels=4, text_dim=12, axes=(8, 12, 12))
EDITS = replace(ARCH, task="edit-plus", clean_references=True)
GRIDS: Sequence[Sequence[Grid]] = (
    [(4, 6), (4, 4), (2, 6)],
    [(4, 10), (6, 6)],
    [(6, 4), (2, 6), (4, 4)],
)
"""Latent pixels of the image of three samples, and of their references."""
SOME = ([(4, 6)], [(4, 10), (6, 4), (2, 2)], [(6, 4)])
"""The same with references of one sample alone."""
NONE = ([(4, 6)], [(4, 10)], [(6, 4)])
CAPTIONS = (5, 9, 5)
"""Rows of their captions."""


def samples(
    *chosen: int, grids: Sequence[Sequence[Grid]] = GRIDS, dtype: torch.dtype = torch.float32
) -> list[dict[str, Tensor]]:
    """Training items of these samples."""
    random, names = torch.Generator().manual_seed(0), ("latents", "reference.0", "reference.1")
    items = [
        {
            **{
                name: torch.randn(4, 1, *grid, generator=random, dtype=torch.float64).to(dtype)
                for name, grid in zip(names, sample, strict=False)
            },
            "text": torch.randn(rows, 12, generator=random, dtype=torch.float64).to(dtype),
        }
        for sample, rows in zip(grids, CAPTIONS, strict=True)
    ]
    return [dict(items[i]) for i in chosen]


class Images:
    spec = QWENIMAGE
    arch = ARCH
    last_layers = (
        "img_mlp.net.2",
        "QwenImageBlock txt_mlp.net.2",
    )
    idle = tuple(
        f"transformer_blocks.{number}.{layer}."
        for number in (1, 5)
        for layer in ("attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "txt_mlp")
    )
    """What the last block would make of text."""

    def items(self, count, ragged=False):
        return samples(*(i % 3 if ragged else 0 for i in range(count)), grids=NONE)


class TestQwenImage(Images, EverySuite):
    deeper = replace(ARCH, layers=6)
    diffusers = DIFFUSERS


class TestSomeReferences(Images, CoreChecks):
    """Samples without a reference next to one that has two, at noise level 0."""

    arch = EDITS
    one_in = 5

    def items(self, count, ragged=False):
        return samples(*(i % 3 if ragged else 1 for i in range(count)), grids=SOME)


class TestDiffusers(Images, DiffusersChecks):
    diffusers = DIFFUSERS
    parameters: ClassVar = dict.fromkeys(PRESETS, 20_430_401_088)
    nearer_cases = ("text to image", "clean references")
    targets: ClassVar = {
        "blocks": QWENIMAGE.adapters.targets["blocks"],
        "two layers": ("attn.to_q", "img_mlp.net.2"),
        "every layer": (
            *QWENIMAGE.adapters.targets["blocks"],
            "embed.img_in",
            "embed.txt_in",
            "embed.timestep_embedder.linear_1",
            "embed.timestep_embedder.linear_2",
            "img_mod.1",
            "txt_mod.1",
            "head.norm_out.linear",
            "head.proj_out",
        ),
    }

    def cases(self):
        return {
            "text to image": Comparison(samples(0, 1, 2, grids=NONE)),
            "references": Comparison(samples(0, 1, 2), replace(ARCH, task="edit-plus")),
            "clean references": Comparison(samples(0, 1, 2), EDITS),
            "references of one sample": Comparison(samples(0, 1, 2, grids=SOME), EDITS),
        }

    def exact(self, patch, dtype):
        from diffusers.models.embeddings import Timesteps
        from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope

        def sinusoid(self, timesteps: Tensor) -> Tensor:
            features = timestep_features(1000 * timesteps.double(), self.num_channels)
            return features.to(timesteps.dtype)

        def rope_params(self, index: Tensor, dim: int, theta: int = 10000) -> Tensor:
            steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
            angles = torch.outer(index.double(), 1.0 / torch.pow(theta, steps))
            return torch.polar(torch.ones_like(angles), angles)

        patch.setattr(Timesteps, "forward", sinusoid)
        if dtype == torch.float64:
            patch.setattr(QwenEmbedRope, "rope_params", rope_params)

    def class_arguments(self, arch):
        return {"zero_cond_t": arch.clean_references}

    def index(self, arch):
        (pipeline,) = [name for name, task in TASKS.items() if task == arch.task]
        return {"_class_name": pipeline}

    def test_the_last_block_has_no_gradient_for_what_it_would_make_of_text(self):
        """Six tensors have none in diffusers either; the three of queries have zeros there."""
        theirs, items = self.diffusers_model(ARCH), samples(0, grids=NONE)
        ours = self.our_model(theirs, ARCH, torch.float32)
        mine = self.outcome(ours, self.run_ours, items, torch.float32)
        them = self.outcome(theirs, self.run_theirs, items, torch.float32)
        absent = {name for name, x in mine.items() if x is None}
        assert len(absent) == 9 and all(name.startswith(self.idle) for name in absent)
        without = {name for name, x in them.items() if x is None}
        assert len(without) == 6
        assert absent - without == {
            f"transformer_blocks.1.attn.{name}"
            for name in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")
        }


def test_a_mark_in_files_of_comfyui_is_no_parameter():
    assert to_native("__index_timestep_zero__") == (), "of 2511"


def test_the_vae_is_the_published_one():
    from diffusers import AutoencoderKLQwenImage

    with torch.device("meta"):
        vae = VAE.build(VAE.published)
        published = AutoencoderKLQwenImage()
    assert sum(x.numel() for x in vae.parameters()) == 126_892_531
    assert all(published.config[name] == value for name, value in VAE.published.items())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"guidance_embeds": True}, "guidance_embeds is True, and only False is known"),
        ({"use_layer3d_rope": True}, "use_layer3d_rope is True, and only False is known"),
        ({"out_channels": 8}, "out_channels is 8, and only 16 is known"),
        ({"axes_dims_rope": [16, 56, 48]}, "do not add up to a head of 128"),
    ],
)
def test_a_switch_that_is_not_known_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        arch_from_config(config_of(PRESETS["t2i"]) | changed, {})


# VAE, captions, samples


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint; tests only read it."""
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder)
    return folder


def pipeline_of(checkpoint: Path, **parts: Any) -> Any:
    """diffusers' pipeline of some parts."""
    from diffusers import QwenImagePipeline

    names = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
    return QwenImagePipeline(**dict.fromkeys(names) | parts)


def vae_of(checkpoint: Path) -> Any:
    from diffusers import AutoencoderKLQwenImage

    return AutoencoderKLQwenImage.from_pretrained(checkpoint / "vae", local_files_only=True)


def test_latents_and_pixels_are_those_of_diffusers(checkpoint, tmp_path):
    """With a mean and a deviation for each channel, as the published VAE has them; the demo's are 0
    and 1."""
    shutil.copytree(checkpoint / "vae", tmp_path / "vae")
    file = tmp_path / "vae" / "config.json"
    per_channel = {
        "latents_mean": [channel / 8 - 1 for channel in range(16)],
        "latents_std": [0.5 + channel / 8 for channel in range(16)],
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | per_channel))
    theirs = vae_of(tmp_path)
    paths = ModelPaths(base=str(checkpoint), vae=str(tmp_path / "vae"))
    vae = QWENIMAGE.auxiliary.media_encoder(paths, CPU, WHOLE)
    vae.load()
    image = torch.rand(3, 1, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    (encoded,) = vae.encode([image])
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (theirs.config.latents_mean, theirs.config.latents_std)
    )
    with torch.no_grad():
        expected = (theirs.encode(image[None]).latent_dist.mode() - mean) / deviation
        pixels = theirs.decode(expected * deviation + mean).sample[0] / 2 + 0.5
    assert encoded["latents"].shape == (16, 1, 8, 12)
    torch.testing.assert_close(encoded["latents"], expected[0], rtol=0, atol=0)
    torch.testing.assert_close(vae.decode(encoded["latents"]), pixels.clamp(0, 1), rtol=0, atol=0)
    assert vae.strides == (4, 8) and QWENIMAGE.data.size_step == 16


def test_features_of_captions_are_those_of_the_pipeline(checkpoint):
    """Of captions of several lengths in one batch, an empty one and a cut one among them: behind the
    last norm, and without the system turn."""
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        checkpoint / "text_encoder", local_files_only=True
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer", local_files_only=True)
    pipeline = pipeline_of(checkpoint, text_encoder=model, tokenizer=tokenizer)
    system = pipeline.prompt_template_encode.partition("{}")[0]
    assert (system, PREFIX_TOKENS) == (
        TEXT.models[0].before,
        pipeline.prompt_template_encode_start_idx,
    )
    assert len(tokenizer(system).input_ids) == PREFIX_TOKENS, "the demo's, as the published one"
    encoder = QWENIMAGE.auxiliary.text_encoder(
        ModelPaths(base=str(checkpoint)), CPU, torch.float32, "never"
    )
    encoder.load()
    captions = ["a red circle", "", "a long one, " * 300]
    with torch.no_grad():
        features, mask = pipeline.encode_prompt(list(captions), device=CPU)
    for caption, padded, real in zip(captions, features, mask, strict=True):
        (ours,) = encoder.encode([caption])
        expected = padded[real.bool()]
        assert ours["text"].shape == (len(expected), 32)
        # fp32; kernels sum in another order
        torch.testing.assert_close(ours["text"], expected, rtol=1e-4, atol=1e-4)
    assert len(expected) == TEXT_TOKENS and len(encoder.truncated) == 1


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_every_step_of_a_sample_is_that_of_the_pipeline(checkpoint, guidance):
    """With guidance, too, which keeps the length of each token."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    arch = replace(ARCH, in_channels=16)
    model, random = make_model(QWENIMAGE, arch).eval(), torch.Generator().manual_seed(2)
    prompt, negative = ({"text": torch.randn(rows, 12, generator=random)} for rows in (9, 4))
    job = GenerationRequest(
        conditions=prompt, negative=negative if guidance > 1 else None, frames=1, height=64,
        width=96, steps=3, guidance=guidance, shift=0.0, seed=7,
    )  # fmt: skip
    ours = sample_steps(QWENIMAGE, model, ModelPaths(base=str(checkpoint)), job)
    calls = 2 if guidance > 1 else 1
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        checkpoint / "scheduler", local_files_only=True
    )
    transformer = DIFFUSERS.transformer(model)
    pipeline = pipeline_of(
        checkpoint, scheduler=scheduler, vae=vae_of(checkpoint), transformer=transformer
    )
    pipeline.set_progress_bar_config(disable=True)
    after: list[Tensor] = []

    def keep(pipeline, step, timestep, values):
        after.append(pipeline._unpack_latents(values["latents"], 64, 96, 8)[0])
        return values

    noise = first_noise(job, (16, 1, 8, 12))
    options = {} if guidance == 1 else {"negative_prompt_embeds": negative["text"][None]}
    (image,) = pipeline(
        prompt_embeds=prompt["text"][None], true_cfg_scale=guidance, height=64, width=96,
        num_inference_steps=3, latents=pipeline._pack_latents(noise[None, :, 0], 1, 16, 8, 12),
        callback_on_step_end=keep, output_type="pt", **options,
    ).images  # fmt: skip
    assert len(after) == 3
    check_steps(ours, after, calls=calls)
    decoded = ours.sampler.decoder.decode(after[-1])[:, 0]
    torch.testing.assert_close(decoded, image, atol=5e-5, rtol=0)


# Edits


class Processor:
    """Qwen2.5-VL's processor, as the pipelines call it: its image processor and a tokenizer."""

    def __init__(self, tokenizer: Any):
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

        self.tokenizer = tokenizer
        self.images = Qwen2VLImageProcessor(
            image_mean=QWEN2_5_VL_TOWER.mean, image_std=QWEN2_5_VL_TOWER.deviation,
            min_pixels=QWEN2_5_VL_TOWER.pixels[0], max_pixels=QWEN2_5_VL_TOWER.pixels[1],
        )  # fmt: skip

    def __call__(self, text: list[str], images: Any, **options: Any) -> Any:
        seen = self.images(images, return_tensors="pt")
        (prompt,) = text
        for grid in seen["image_grid_thw"].tolist():
            prompt = prompt.replace("<|image_pad|>", "<slot>" * (grid[1] * grid[2] // 4), 1)
        tokens = self.tokenizer(prompt.replace("<slot>", "<|image_pad|>"), return_tensors="pt")
        seen.update(tokens)
        return seen


class Reader:
    """Qwen2.5-VL in transformers 5, told which tokens are a picture's, as the pipelines' version
    found out by itself."""

    dtype = torch.float32

    def __init__(self, checkpoint: Path):
        from transformers import Qwen2_5_VLForConditionalGeneration

        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            checkpoint / "text_encoder", local_files_only=True
        )

    def __call__(self, input_ids: Tensor, **options: Any) -> Any:
        kinds = (input_ids == self.model.config.image_token_id).int()
        return self.model(input_ids=input_ids, mm_token_type_ids=kinds, **options)


def edit_pipeline(task: str, **parts: Any) -> Any:
    """diffusers' pipeline of a task, of some parts."""
    import diffusers

    (kind,) = [name for name, other in TASKS.items() if other == task]
    names = ("scheduler", "vae", "text_encoder", "tokenizer", "processor", "transformer")
    pipeline = getattr(diffusers, kind)(**dict.fromkeys(names) | parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pictures(*sizes: tuple[int, int]) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


EDITED = {
    "edit": (PRESETS["edit"], [(160, 96)]),
    "edit-plus, one": (PRESETS["edit-2509"], [(160, 96)]),
    "edit-plus, two": (PRESETS["edit-2511"], [(160, 96), (64, 128)]),
}


@pytest.mark.parametrize("edited", EDITED)
def test_features_of_edits_are_those_of_the_pipeline(checkpoint, edited):
    from transformers import AutoTokenizer

    arch, sizes = EDITED[edited]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer", local_files_only=True)
    pipeline = edit_pipeline(
        arch.task, text_encoder=Reader(checkpoint), processor=Processor(tokenizer)
    )
    encoder = QWENIMAGE.for_arch(arch).auxiliary.text_encoder(
        ModelPaths(base=str(checkpoint)), CPU, torch.float32, "never"
    )
    encoder.load()
    assert encoder.family.dropped == pipeline.prompt_template_encode_start_idx
    images = pictures(*sizes)
    for caption in ("make it red", ""):
        with torch.no_grad():
            (expected,), mask = pipeline.encode_prompt(
                caption, image=images if arch.task == "edit-plus" else images[0], device=CPU
            )
        (ours,) = encoder.encode([Prompt(caption, [pixels(image) for image in images])])
        assert mask is None and ours["text"].shape == expected.shape
        torch.testing.assert_close(ours["text"], expected, rtol=1e-4, atol=1e-4)


def test_references_have_the_sizes_of_the_pipelines():
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    spec = QWENIMAGE.for_arch(PRESETS["edit-2511"])
    for height, width in [(512, 512), (720, 1280), (1200, 777), (64, 900)]:
        for size, area in (
            (spec.data.reference_size, plus.VAE_IMAGE_SIZE),
            (spec.data.picture_size, plus.CONDITION_IMAGE_SIZE),
        ):
            assert size(height, width, 2) == plus.calculate_dimensions(area, width / height)[::-1]
    only = QWENIMAGE.for_arch(PRESETS["edit"])
    assert only.data.picture_size(720, 1280, 1) == spec.data.reference_size(720, 1280, 1)
    with pytest.raises(UserError, match="takes one reference, and a sample has 2; take its later"):
        only.data.reference_size(512, 512, 2)
    assert only.data.needs_references and spec.data.needs_references
    assert (only.data.shape_reference, spec.data.shape_reference) == (-1, -1)
    assert QWENIMAGE.for_arch(PRESETS["t2i"]).data.reference_size is None


def test_a_transformer_by_itself_generates_from_what_its_base_does(checkpoint, tmp_path):
    """As an exported one, whose config.json does not say."""
    base, alone = tmp_path / "base", tmp_path / "exports" / "step"
    shutil.copytree(checkpoint, base)
    shutil.copytree(checkpoint / "transformer", alone)
    index = json.loads((base / "model_index.json").read_text())
    for kind, task in TASKS.items():
        (base / "model_index.json").write_text(json.dumps(index | {"_class_name": kind}))
        for paths in (
            ModelPaths(base=str(base)),
            ModelPaths(base=str(base), transformer=str(alone)),
        ):
            assert arch_here(QWENIMAGE, paths)[1].task == task
    assert arch_here(QWENIMAGE, ModelPaths(transformer=str(alone)))[1].task == "image"


@pytest.mark.parametrize("edited", EDITED)
def test_every_step_of_an_edit_is_that_of_the_pipeline(checkpoint, edited, monkeypatch):
    """With guidance, from the references' pixels on: its latents are ours, too."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    published, sizes = EDITED[edited]
    # a hundredth of the area: this is about steps
    small = lambda area, ratio: (32 * round(3 * ratio**0.5), 32 * round(3 / ratio**0.5), None)
    monkeypatch.setattr(edit, "calculate_dimensions", small)
    monkeypatch.setattr(plus, "calculate_dimensions", lambda *size: small(*size)[:2])
    arch = replace(
        ARCH, in_channels=16, task=published.task, clean_references=published.clean_references
    )
    spec, paths = QWENIMAGE.for_arch(arch), ModelPaths(base=str(checkpoint))
    model, random = make_model(QWENIMAGE, arch).eval(), torch.Generator().manual_seed(2)
    prompt, negative = ({"text": torch.randn(rows, 12, generator=random)} for rows in (9, 4))
    images, vae = pictures(*sizes), spec.auxiliary.media_encoder(paths, CPU, WHOLE)
    vae.load()
    shrunk = [image.resize(small(0, image.width / image.height)[:2], 1) for image in images]
    references = [vae.encode([pixels(image)[:, None]])[0]["latents"] for image in shrunk]
    job = GenerationRequest(
        conditions=prompt, negative=negative, references=references, frames=1, height=64, width=96,
        steps=3, guidance=4.0, shift=0.0, seed=7,
    )  # fmt: skip
    ours = sample_steps(spec, model, paths, job)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
        checkpoint / "scheduler", local_files_only=True
    )
    pipeline = edit_pipeline(
        arch.task,
        scheduler=scheduler,
        vae=vae_of(checkpoint),
        transformer=DIFFUSERS.transformer(model),
    )
    after: list[Tensor] = []

    def keep(pipeline, step, timestep, values):
        after.append(pipeline._unpack_latents(values["latents"], 64, 96, 8)[0])
        return values

    noise = first_noise(job, (16, 1, 8, 12))
    pipeline(
        image=images if arch.task == "edit-plus" else images[0], prompt_embeds=prompt["text"][None],
        negative_prompt_embeds=negative["text"][None], true_cfg_scale=4.0, height=64, width=96,
        num_inference_steps=3, latents=pipeline._pack_latents(noise[None, :, 0], 1, 16, 8, 12),
        callback_on_step_end=keep, output_type="latent",
    )  # fmt: skip
    assert len(after) == 3
    check_steps(ours, after, calls=2)


class TestRunFiles(RunFileChecks):
    spec = QWENIMAGE
    folder = Path(__file__).parents[1] / "configs"
    count = 3


# Plans, the demo, ranks


class TestKeptBytes(KeptBytesConformance):
    spec = QWENIMAGE
    arch = replace(ARCH, layers=3)
    size = (1, 256, 256)
    wider: ClassVar = {"dim": 512, "axes": (32, 112, 112)}
    larger = (1, 512, 512)
    daily = (pytest.param("attn_only, 0-2=full", marks=pytest.mark.slow),)
    nightly = ("none", "full", "attn_only")


class TestPlan(FullSizePlanConformance):
    spec = QWENIMAGE
    preset = "t2i"
    size = (1, 1024, 1024)
    cut = 16


class TestSplit(FullSizeSplitConformance):
    spec = QWENIMAGE
    preset = "t2i"
    size = (1, 1024, 1024)
    few: ClassVar = {"layers": 4}
    all_blocks = ("full", 3)
    most_apart = 1.1 * 2 * 340e6  # no more than a block

    def crossing(self, arch, cut):
        """Two streams, an empty one, time, rotary table. One image has no masks. Adapters are behind
        both streams."""
        return 5, 2


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo.write(QWENIMAGE, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = QWENIMAGE
    num_samples = range(1, 100)
    trained = "diffusion_model.transformer_blocks.0.attn.to_q.lora_A.weight"
    trained_names = r"diffusion_model\.transformer_blocks\."


class TestBase(TrainedBaseChecks):
    spec = QWENIMAGE
    vae = VAE
    text_encoder = "Qwen2_5_VLForConditionalGeneration"
    layers = (1, 2)


@pytest.mark.slow  # minutes
def test_kernels_compute_what_torch_computes_under_every_policy():
    check_kernels(TestSomeReferences)


# and not with those of ranks, which each change waits for: the interpreter takes minutes
@pytest.mark.slow
class TestKernelRanks(Images, KernelRanksConformance):
    """A block of each kind, and images of a few tokens, one with a reference."""

    arch = EDITS
    cases = ("brief full",)
    more = ("gated_sum", "gated_sum_backward")

    def items(self, count, ragged=False):
        return samples(0, 1, grids=([(2, 4)], [(2, 6), (2, 2)], []))


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextConformance):
    """Ranks that share the tokens of each sample: caption, image and references by themselves; the
    queries of the last block are the image's."""

    four: ClassVar = replace(EDITS, heads=4, axes=(4, 6, 6))
    two: ClassVar = EDITS
    subjects: ClassVar = {
        "odd": Subject(QWENIMAGE, four, samples(0), 2),
        "text to image": Subject(QWENIMAGE, four, samples(0, grids=NONE), 2),
        "ragged": Subject(QWENIMAGE, four, samples(0, 1, 2, grids=SOME), 2),
        "two heads": Subject(QWENIMAGE, two, samples(0, 1), 2),
    }


@pytest.mark.exhaustive
class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_qwenimage.train"
