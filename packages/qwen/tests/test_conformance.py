"""Qwen-Image 2.1 against every suite of the core, and diffusers: outputs, every gradient, captions,
samples, adapters."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.commands import cli
from ditkit_core.errors import UserError
from ditkit_core.families.references import area_size
from ditkit_core.loading.architecture import arch_here
from ditkit_core.models.encoders import WHOLE, GenerationRequest, Prompt
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.nn.rope import timestep_features
from ditkit_core.testing.conformance import CoreChecks
from ditkit_core.testing.conformance_audit import AuditChecks
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
from ditkit_core.testing.conformance_peers import PeerChecks
from ditkit_core.testing.conformance_plans import FullSizePlanConformance, KeptBytesConformance
from ditkit_core.testing.conformance_replicas import ReplicaConformance
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.demo import Demo, TrainedBaseChecks
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.plans import check_kept, step_of
from ditkit_core.testing.run_files import RunFileChecks
from ditkit_core.testing.specs import altered
from ditkit_core.testing.suites import EverySuite
from ditkit_core.testing.world import make_model
from ditkit_qwen.demo.write import ARCH as DEMO
from ditkit_qwen.demo.write import build_vae, write_checkpoint
from ditkit_qwen.encoders import TEXT, TEXT_LAYERS, VAE
from ditkit_qwen.model import QwenTransformer, make_inputs
from ditkit_qwen.presets import PRESETS, QwenArch, arch_from_config, config_of
from ditkit_qwen.spec import QWEN
from ditkit_qwen.verify import DIFFUSERS

CPU = torch.device("cpu")
ARCH = QwenArch(dim=64, heads=2, layers=2, in_channels=8, text_dim=12, axes=(8, 12, 12))
GRIDS, CAPTIONS = [(4, 6), (6, 8), (6, 4)], (5, 9, 5)
"""Latent pixels, and rows of captions, of three samples."""
EDITS = (
    {"image": (4, 6), "text": (3, 2, 4), "references": ((4, 4), (2, 6))},
    {"image": (6, 10), "text": (9,), "references": ()},
    {"image": (2, 14), "text": (2, 0, 7), "references": ((4, 2), (4, 4))},
    {"image": (2, 6), "text": (4, 1), "references": ((6, 2),)},
)
"""Latent pixels of an image and its references, and rows of text in front of each reference and
behind the last one. Two of them touch."""


def items(count: int, ragged: bool = False) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    sizes = [
        (GRIDS[i % 3 if ragged else 0], CAPTIONS[i % 3 if ragged else 0]) for i in range(count)
    ]
    return [
        {
            "latents": torch.randn(8, 1, *grid, generator=random),
            "text": torch.randn(rows, 12, generator=random),
        }
        for grid, rows in sizes
    ]


def edits(*chosen: int, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """Training items of these samples of `EDITS`."""
    random, made = torch.Generator().manual_seed(0), []

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64).to(dtype)

    for sample in EDITS:
        *between, last = sample["text"]
        images = enumerate(sample["references"])
        made.append(
            {
                "latents": draw(8, 1, *sample["image"]),
                **{f"reference.{i}": draw(8, 1, *grid) for i, grid in images},
                **{f"text.{i}": draw(rows, 12) for i, rows in enumerate(between)},
                "text": draw(last, 12),
            }
        )
    return [dict(made[i]) for i in chosen]


class Images:
    spec = QWEN
    arch = ARCH

    def items(self, count, ragged=False):
        return items(count, ragged)


class TestQwen(Images, EverySuite):
    last_layers = ("img_mlp.out",)
    deeper = replace(ARCH, layers=6)
    diffusers = DIFFUSERS


class Edits(Images):
    """Samples with two references, with none, and with two that touch."""

    last_layers = TestQwen.last_layers

    def items(self, count, ragged=False):
        return edits(*(i % 3 if ragged else 0 for i in range(count)))


class TestEdits(Edits, CoreChecks):
    one_in = 5


class TestPeersOfEdits(Edits, PeerChecks):
    diffusers = DIFFUSERS


class TestAuditOfEdits(Edits, AuditChecks):
    """Errors by place."""


@pytest.mark.ranks
@pytest.mark.slow
class TestReplicasOfEdits(Edits, ReplicaConformance):
    """One rank has references where another has none."""


class TestDiffusers(Edits, DiffusersChecks):
    diffusers = DIFFUSERS
    parameters: ClassVar = {"2.1": 7_115_124_736}
    converter = ("comfyui", DIFFUSERS.convert)
    nearer_cases = ("an edit and an image from text",)
    targets: ClassVar = {
        "blocks": QWEN.adapters.targets["blocks"],
        "two layers": ("attn.to_q", "img_mlp.proj"),
        "every layer": (
            *QWEN.adapters.targets["blocks"],
            "embed.img_in",
            "embed.txt_in.in_layer",
            "embed.txt_in.out_layer",
            "embed.timestep_embedder.linear_1",
            "embed.timestep_embedder.linear_2",
            "embed.modulation",
            "head.norm_out.linear",
            "head.proj_out",
        ),
    }

    def cases(self):
        return {
            "an edit": Comparison(edits(0)),
            "an image from text": Comparison(edits(1)),
            "references that touch": Comparison(edits(2)),
            "alike": Comparison(edits(0, 0)),
            "an edit and an image from text": Comparison(edits(0, 1)),
            "three": Comparison(edits(0, 1, 3)),
            "four": Comparison(edits(0, 1, 2, 3)),
        }

    def exact(self, patch, dtype):
        import diffusers.models.transformers.transformer_qwenimage21 as theirs

        def sinusoid(self, timestep: Tensor) -> Tensor:
            return timestep_features(1000 * timestep.double(), self.timestep_dim).to(timestep.dtype)

        def rope_params(self, index: Tensor, dim: int, theta: int = 10000) -> Tensor:
            steps = torch.arange(0, dim, 2, dtype=torch.float64) / dim
            angles = torch.outer(index.double(), 1.0 / torch.pow(theta, steps))
            return torch.polar(torch.ones_like(angles), angles)

        patch.setattr(theirs.QwenImage21TemporalTimesteps, "forward", sinusoid)
        if dtype == torch.float64:
            patch.setattr(theirs.QwenImage21Rope, "rope_params", rope_params)

    def test_comfyui_has_both_halves_of_the_unit_in_one_tensor(self):
        with torch.device("meta"):
            ours = QwenTransformer(PRESETS["2.1"], Precision()).state_dict()
        comfyui = self.in_form("comfyui", ours)
        assert comfyui["transformer_blocks.0.img_mlp.gate_up.weight"].shape == (6 * 4096, 4096)


@pytest.mark.parametrize(
    ("changed", "index", "said"),
    [
        ({"causal_condition": False}, {}, "causal_condition is False, and only True is known"),
        ({"out_channels": 8}, {}, "out_channels is 8, and only 64 is known"),
        ({"axes_dims_rope": [16, 56, 48]}, {}, "do not add up to a head of 128"),
        ({}, {"sample_sigmas": [1.0, 0.5]}, "noise levels of its own"),
        ({}, {"_class_name": "QwenImage21TurboModularPipeline"}, "of the distilled form"),
    ],
)
def test_a_switch_that_is_not_known_is_refused(changed, index, said):
    with pytest.raises(ValueError, match=said):
        arch_from_config(config_of(PRESETS["2.1"]) | changed, index)


# VAE, captions, samples


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint; tests only read it."""
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder)
    return folder


def test_images_are_opaque_for_the_vae_and_samples_are_laid_over_white(checkpoint, tmp_path):
    """With an untrained VAE, whose samples are not opaque."""
    from diffusers import QwenImage21Pipeline

    theirs = build_vae()
    theirs.save_pretrained(tmp_path / "vae")
    vae = QWEN.auxiliary.media_encoder(ModelPaths(base=str(tmp_path)), CPU, WHOLE)
    assert (theirs.config.in_channels, theirs.config.out_channels) == (4, 4)
    statistics = {"latents_mean": [0.1] * 32, "latents_std": [2.0] * 32}
    theirs.register_to_config(**statistics)
    vae.load()
    vae.module.register_to_config(**statistics)
    image = torch.rand(3, 1, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    (encoded,) = vae.encode([image])
    pipeline = QwenImage21Pipeline(None, theirs, None, NamedProcessor(checkpoint), None)
    opaque = torch.cat([image, torch.ones_like(image[:1])])[None]
    with torch.no_grad():
        expected = pipeline._encode_vae_image(opaque, torch.Generator())[0]
        assert encoded["latents"].shape == (32, 1, 4, 6)
        torch.testing.assert_close(encoded["latents"], expected, rtol=0, atol=0)
        pixels = theirs.decode(expected[None] * 2.0 + 0.1).sample[0] / 2 + 0.5
    opacity = pixels[3:]
    assert 0.01 < opacity.std()
    over_white = pixels[:3] * opacity + (1 - opacity)
    torch.testing.assert_close(vae.decode(encoded["latents"]), over_white, rtol=0, atol=1e-6)
    assert vae.strides == (8, 16) and QWEN.data.size_step == 32


class NamedProcessor:
    """Qwen3-VL's processor, which the pipeline calls: its tokenizer, its template of a system turn,
    and its processor of images."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

        self.tokenizer = AutoTokenizer.from_pretrained(
            checkpoint / "processor", local_files_only=True
        )
        self.images = Qwen2VLImageProcessor(
            patch_size=16, merge_size=2, min_pixels=256 * 256, max_pixels=4096 * 4096,
            image_mean=[0.5] * 3, image_std=[0.5] * 3,
        )  # fmt: skip

    def __call__(self, text: list[str], images: Any = (), **options: Any) -> Any:
        if not images:
            return self.tokenizer(text, **options)
        seen = dict(self.images(images, return_tensors="pt"))
        sizes, prompts = iter(seen["image_grid_thw"].tolist()), []
        for prompt in text:
            first, *others = prompt.split(SLOT)
            for behind, (_, rows, columns) in zip(others, sizes, strict=False):
                first += SLOT * (rows * columns // 4) + behind
            prompts.append(first)
        tokens = self.tokenizer(prompts, **options)
        slot = self.tokenizer.convert_tokens_to_ids(SLOT)
        tokens.update(seen | {"mm_token_type_ids": (tokens.input_ids == slot).int()})
        return tokens

    def apply_chat_template(self, messages: Any, **options: Any) -> list[list[int]]:
        """The published template of a system turn."""
        ((message,),) = [message["content"] for message in messages]
        turn = f"<|im_start|>system\n{message['text']}<|im_end|>\n"
        return [self.tokenizer(turn).input_ids]


SLOT = "<|image_pad|>"


def text_encoder(checkpoint: Path) -> Any:
    paths = ModelPaths(base=str(checkpoint))
    encoder = QWEN.auxiliary.text_encoder(paths, CPU, torch.float32, "never")
    encoder.load()
    return encoder


@pytest.fixture(scope="module")
def language_model(checkpoint: Path) -> torch.nn.Module:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint / "text_encoder", local_files_only=True
    )


def picture(index: int, height: int, width: int) -> Image.Image:
    random = np.random.default_rng(index)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))


def pixels_of(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


PICTURES = (picture(0, 256, 320), picture(1, 320, 256))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_features_of_captions_are_those_of_the_pipeline(checkpoint, language_model, count):
    """Of captions of several lengths in one batch, an empty one among them: before the last norm,
    without the system turn, and in front of, between and behind references."""
    from diffusers import QwenImage21Pipeline

    processor = NamedProcessor(checkpoint)
    pipeline = QwenImage21Pipeline(None, None, language_model, processor, None)
    encoder, pictures = text_encoder(checkpoint), PICTURES[:count]
    captions = ["a red circle", "", "a long one, " * 30]
    with torch.no_grad():
        features, mask, slots = pipeline.encode_prompt(
            list(captions), image=list(pictures) or None, device=CPU
        )
    for caption, padded, real, is_slot in zip(captions, features, mask, slots, strict=True):
        (ours,) = encoder.encode([Prompt(caption, list(map(pixels_of, pictures)))])
        assert int(is_slot.sum()) == count * 80
        starts = [0, *(is_slot.diff() & ~is_slot[1:]).nonzero()[:, 0].add(1).tolist()]
        for index, start in enumerate(starts):
            expected = padded[start:][real[start:].bool()]
            if index < count:
                expected = expected[: is_slot[start:].tolist().index(True)]
            part = ours["text" if index == count else f"text.{index}"]
            assert part.shape == expected.shape and part.shape[1] == 32
            # fp32; kernels sum in another order
            torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)
        assert len(ours) == len(starts) == count + 1


def test_an_empty_caption_is_a_space_and_a_slot_in_a_caption_is_removed(checkpoint):
    encoder = text_encoder(checkpoint)
    pairs = (("", " "), ("a <|image_pad|>red", "a red"), ("<|image_<|image_pad|>pad|>red", "red"))
    for pictures in ([], [pixels_of(PICTURES[0])]):
        for caption, other in pairs:
            one, two = encoder.encode([Prompt(caption, pictures), Prompt(other, pictures)])
            assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_the_doctor_counts_the_tokens_of_a_prompt_as_encoding_does(checkpoint):
    """With the words of its pictures, and without slots in its caption."""
    encoder = text_encoder(checkpoint)
    for count, captions in ((0, ("red " * 9000,)), (3, ("red " * 9000, SLOT + "red " * 8190))):
        assert encoder.cut_of("red", count) is None
        for caption in captions:
            cut = encoder.cut_of(caption, count)
            encoder._prompt_tokens(caption, [(1, 1)] * count)
            assert f": {cut[0]} were cut" in encoder.truncated.pop()
            assert cut[1] and caption.replace(SLOT, "").startswith(cut[1])


PROMPTS = ("a red circle", "a blue square, " * 3)


@pytest.mark.parametrize(
    ("count", "guidance"),
    [
        (0, 4.0),
        (1, 1.0),
        (2, 4.0),
        # with fewer references or calls than these
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1.0), (1, 4.0), (2, 1.0))),
    ],
)
def test_every_step_of_a_sample_is_that_of_the_pipeline(
    checkpoint, language_model, guidance, count
):
    """From the prompt, the negative prompt and references that both see, to pixels."""
    from diffusers import (
        AutoencoderKLQwenImage21,
        FlowMatchEulerDiscreteScheduler,
        QwenImage21Pipeline,
    )

    channels = DEMO.in_channels
    arch = replace(ARCH, in_channels=channels, text_dim=32)
    model, encoder = make_model(QWEN, arch).eval(), text_encoder(checkpoint)
    images = (picture(0, 256, 256), picture(1, 128, 512))[:count]
    pictures = list(map(pixels_of, images))
    prompt, negative = (encoder.encode([Prompt(text, pictures)])[0] for text in PROMPTS)
    vae = QWEN.auxiliary.media_encoder(ModelPaths(base=str(checkpoint)), CPU, WHOLE)
    vae.load()
    job = GenerationRequest(
        conditions=prompt, negative=negative if guidance > 1 else None, frames=1, height=64,
        width=96, steps=3, guidance=guidance, shift=0.0, seed=7,
        references=[vae.encode([image[:, None]])[0]["latents"] for image in pictures],
    )  # fmt: skip
    ours = sample_steps(QWEN, model, ModelPaths(base=str(checkpoint)), job)
    calls = 2 if guidance > 1 else 1
    pipeline = QwenImage21Pipeline(
        FlowMatchEulerDiscreteScheduler.from_pretrained(
            checkpoint / "scheduler", local_files_only=True
        ),
        AutoencoderKLQwenImage21.from_pretrained(checkpoint / "vae", local_files_only=True),
        language_model,
        NamedProcessor(checkpoint),
        DIFFUSERS.transformer(model),
    )
    pipeline.set_progress_bar_config(disable=True)
    after: list[Tensor] = []

    def keep(pipeline, step, timestep, values):
        after.append(pipeline._unpack_latents(values["latents"], 64, 96, 16)[0])
        return values

    noise = first_noise(job, (channels, 1, 4, 6))
    (image,) = pipeline(
        prompt=PROMPTS[0], negative_prompt=PROMPTS[1] if guidance > 1 else None,
        image=list(images) or None, output_resolution=256,
        true_cfg_scale=guidance, height=64, width=96, num_inference_steps=3,
        latents=pipeline._pack_latents(noise[:, 0][None], 1, channels, 4, 6),
        callback_on_step_end=keep, output_type="pt",
    ).images  # fmt: skip
    assert len(after) == 3
    check_steps(ours, after, calls=calls)
    over_white = image[:3] * image[3:] + (1 - image[3:])
    decoded = ours.sampler.decoder.decode(ours.latents)[:, 0]
    torch.testing.assert_close(decoded, over_white, atol=2e-4, rtol=0)


class TestRunFiles(RunFileChecks):
    spec = QWEN
    folder = Path(__file__).parents[1] / "configs"
    count = 3


def test_a_repository_of_the_distilled_form_is_refused_in_a_line(tmp_path, checkpoint):
    """By the index that diffusers writes."""
    from diffusers import QwenImage21TurboModularPipeline

    shutil.copytree(checkpoint, tmp_path / "turbo")
    (tmp_path / "turbo" / "model_index.json").unlink()
    QwenImage21TurboModularPipeline().save_pretrained(
        str(tmp_path / "turbo"), overwrite_modular_index=True
    )
    with pytest.raises(UserError, match="its pipeline is QwenImage21TurboModularPipeline, of the"):
        arch_here(QWEN, ModelPaths(base=str(tmp_path / "turbo")))


def test_a_slot_is_four_latent_pixels_of_a_reference_of_any_shape():
    """The text encoder sees a reference at the size at which the VAE encodes it, and takes it as it
    is; so it does up to a shape of 200:1."""
    random = np.random.default_rng(0)
    sides = [*random.integers(64, 4000, (300, 2)).tolist(), [20, 4000], [4000, 20]]
    vision = TEXT.models[0].vision
    assert vision is not None and QWEN.data.picture_size is QWEN.data.reference_size
    for height, width in sides:
        size = QWEN.data.reference_size(height, width, 1)
        assert 4 * vision.num_slots(*size) == size[0] // 16 * (size[1] // 16), (height, width)


def test_a_caption_without_the_references_of_its_sample_is_refused():
    (item,) = edits(0)
    del item["reference.1"]
    with pytest.raises(UserError, match="encoded with 2 references is used with 1"):
        make_inputs([item["latents"]], torch.tensor([0.5]), [item], 1.0)


# Edits by the commands

SMALL = area_size(256 * 256)
EDITING = altered(QWEN, reference_size=SMALL, picture_size=SMALL)
"""With references of fewer pixels: the fewest that the text encoder sees."""


class Run:
    """A data set of two edits and an image from text, one batch of all, and its commands."""

    def __init__(self, folder: Path, checkpoint: Path):
        self.folder = folder
        self.data, self.cache = folder / "images", folder / "cache"
        rows, seeds = [], iter(range(6))
        for name, count in (("one", 1), ("two", 2), ("none", 0)):
            names = [f"{name}-{index}.png" for index in range(count)]
            for file in names:
                self.write(self.data / "references" / file, picture(next(seeds), 256, 256))
            self.write(self.data / f"{name}.png", picture(next(seeds), 64, 64))
            row = {"file_name": f"{name}.png", "text": f"make it {name}"}
            if names:
                row["references"] = [f"references/{file}" for file in names]
            rows.append(row)
        lines = [json.dumps(row) for row in rows]
        (self.data / "metadata.jsonl").write_text("\n".join(lines))
        self.common = [
            "--model.base", str(checkpoint), "--model.dtype", "fp32", "--encode.text_dtype", "fp32",
            "--data.folder", str(self.data), "--data.height", "64", "--data.width", "64",
            "--encode.cache", str(self.cache), "--train.threads", "1",
        ]  # fmt: skip

    def write(self, file: Path, image: Image.Image) -> None:
        """Write an image."""
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)

    def run(self, command: str, *flags: str) -> int:
        return cli.run(EDITING, command, [*self.common, *flags])

    def entries(self, kind: str) -> int:
        """Number of entries of the cache."""
        return len({file.stem for file in (self.cache / kind).rglob("*.safetensors")})


def test_edits_and_images_from_text_are_trained_sampled_and_exported(tmp_path, checkpoint, capsys):
    """And a pixel of a reference is part of the keys of its own captions alone."""
    run, folder = Run(tmp_path, checkpoint), tmp_path / "run"
    flags = (
        "--train.steps", "2", "--train.batch_tokens", "4000", "--train.caption_dropout", "0.5",
        "--sample.captions", "3", "--sample.steps", "1", "--sample.guidance", "2",
    )  # fmt: skip
    assert run.run("train", "--run.folder", str(folder), *flags) == 0
    assert "diffusers loads run.safetensors and agrees with our model" in capsys.readouterr().out
    assert len(list((folder / "samples").rglob("*.png"))) >= 3
    # An image and its references; its caption, and the empty one with the same references.
    assert (run.entries("media"), run.entries("text")) == (6, 6)
    file = run.data / "references/two-1.png"
    with Image.open(file) as image:
        image.putpixel((9, 3), (1, 2, 3))
        image.save(file)
    assert run.run("encode") == 0
    assert (run.entries("media"), run.entries("text")) == (7, 8)
    capsys.readouterr()
    shapes = (("square", 128, 128), ("wide", 64, 256))
    for name, *sides in shapes:
        run.write(tmp_path / f"{name}.png", picture(3, *sides))
    files = [flag for name, *_ in shapes for flag in ("--reference", str(tmp_path / f"{name}.png"))]
    prompt = ("--run", str(folder), "--prompt", "make it so", "--sample.steps", "1")
    for references, size in ((files, (128, 32)), ([], (64, 64))):
        before = set(tmp_path.rglob("*.png"))
        assert cli.run(EDITING, "sample", [*prompt, *references]) == 0
        (sample,) = set(tmp_path.rglob("*.png")) - before
        with Image.open(sample) as image:
            assert image.size == size


# Plans, the demo, ranks


class TestKeptBytes(KeptBytesConformance):
    spec = QWEN
    arch = replace(ARCH, layers=3)
    size = (1, 256, 256)
    wider: ClassVar = {"dim": 512, "axes": (32, 112, 112)}
    larger = (1, 512, 512)
    daily = (pytest.param("attn_only, 0-2=full", marks=pytest.mark.slow),)
    nightly = ("none", "full", "attn_only")


@pytest.mark.parametrize(
    "policy",
    ["attn_only", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("none", "full"))],
)
def test_blocks_keep_what_is_planned_with_references(policy):
    """Two references, which are tokens of the prefix and blocks in its attention."""
    step = step_of(QWEN, TestKeptBytes.arch, (1, 64, 64), AdapterConfig(rank=4))
    with torch.device("meta"):
        item = QWEN.training.empty_item(TestKeptBytes.arch, (1, 64, 64), [(64, 96), (96, 32)])
    assert QWEN.training.num_tokens(item) == 512 + 2 + 4 * 4 + 4 * 6 + 6 * 2
    check_kept(replace(step, batch=[item]).with_execution(checkpointing=policy))


class TestPlan(FullSizePlanConformance):
    spec = QWEN
    preset = "2.1"
    size = (1, 1024, 1024)
    cut = 16


class TestSplit(FullSizeSplitConformance):
    spec = QWEN
    preset = "2.1"
    size = (1, 1024, 1024)
    few: ClassVar = {"layers": 4}
    all_blocks = ("full", 3)
    most_apart = 1.1 * 2 * 218e6  # no more than a block

    def _items(self, arch):
        with torch.device("meta"):
            return [self.spec.training.empty_item(arch, self.size, [(512, 768)])]

    def crossing(self, arch, cut):
        """Two streams, their modulations, time, rotary table. One image has no masks. Adapters are
        behind both streams."""
        return 6, 2


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo.write(QWEN, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = QWEN
    num_samples = range(1, 100)
    trained = "diffusion_model.transformer_blocks.0.attn.to_q.lora_A.weight"
    trained_names = r"diffusion_model\.transformer_blocks\."


class TestBase(TrainedBaseChecks):
    spec = QWEN
    vae = VAE
    text_encoder = "Qwen3VLForConditionalGeneration"
    tokenizer_folder = "processor"
    layers = (1, TEXT_LAYERS - 1)


@pytest.mark.slow  # minutes
def test_kernels_compute_what_torch_computes_under_every_policy():
    check_kernels(TestQwen)


# and not with those of ranks, which each change waits for: the interpreter takes minutes
@pytest.mark.slow
class TestKernelRanks(Images, KernelRanksConformance):
    """A block, and images of a few tokens."""

    arch = replace(ARCH, layers=1)
    cases = ("brief full", "brief full, split")
    more = ("gated_sum", "gated_sum_backward")


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextConformance):
    """Ranks that share the tokens of each sample: the causal prefix by itself, with blocks for its
    references, and the image, whose keys are both."""

    four: ClassVar = replace(ARCH, layers=1, heads=4, axes=(4, 6, 6))
    two: ClassVar = replace(ARCH, layers=1)
    subjects: ClassVar = {
        "odd": Subject(QWEN, four, items(1), 2),
        "edit": Subject(QWEN, four, edits(0), 2),
        "ragged": Subject(QWEN, four, edits(0, 1, 2), 2),
        "two heads": Subject(QWEN, two, edits(1, 2), 2),
    }


@pytest.mark.exhaustive
class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_qwen.train"
