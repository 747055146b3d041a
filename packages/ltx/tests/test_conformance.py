"""LTX-Video against every suite of the core, and diffusers: outputs, every gradient, captions,
latents, samples, adapters."""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ditkit_core.commands import cli
from ditkit_core.data.media.synthetic import COLOURS, SHAPES
from ditkit_core.errors import UserError
from ditkit_core.families.demo_motions import CLIPS, DIRECTIONS, FRAMES, SIDE, moving
from ditkit_core.families.first_frame import first_frame_mask
from ditkit_core.families.vae import DiffusersVae
from ditkit_core.io.rng import generator
from ditkit_core.models.conditions import ClipInputs
from ditkit_core.models.encoders import WHOLE, GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.nn.rope import timestep_features
from ditkit_core.testing.conformance import Conformance
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.conformance_diffusers import (
    Comparison,
    DiffusersChecks,
    check_steps,
    sample_steps,
)
from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
from ditkit_core.testing.conformance_kernel_ranks import KernelRanksConformance
from ditkit_core.testing.conformance_plans import FullSizePlanConformance, KeptBytesConformance
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.demo import BaseFilesChecks, Demo
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.run_files import RunFileChecks
from ditkit_core.testing.suites import EverySuite
from ditkit_core.testing.world import make_model
from ditkit_ltx.demo.write import ARCH as DEMO
from ditkit_ltx.demo.write import write_checkpoint
from ditkit_ltx.encoders import VAE, seconds_of
from ditkit_ltx.model import LtxTransformer, make_inputs
from ditkit_ltx.presets import PRESETS, LtxArch, arch_from_config, config_of
from ditkit_ltx.spec import LTX, distilled_levels
from ditkit_ltx.state_dict import to_official
from ditkit_ltx.verify import DIFFUSERS

CPU = torch.device("cpu")
ARCH = LtxArch(dim=64, heads=4, layers=2, in_channels=16, text_dim=32, freq_dim=256)
"""A width that is no multiple of 6, as 2048 and 4096 are not."""
GRIDS, CAPTIONS = [(2, 4, 5), (3, 4, 5), (2, 5, 4)], (20, 33, 20)
"""Latent frames, rows and columns, and rows of captions, of three samples."""
RATES = (25.0, 12.0, 30.0)


def item(
    sample: int, causal: bool = False, fps: float = 0.0, first: bool = False
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(sample)
    frames, rows = GRIDS[sample][0], CAPTIONS[sample]
    conditions = {
        "latents": torch.randn(16, *GRIDS[sample], generator=random),
        "text": torch.randn(rows, 32, generator=random),
        "seconds": seconds_of(8 * frames - 7, fps or RATES[sample], causal),
    }
    image = {"first_frame": torch.randn(16, 1, *GRIDS[sample][1:], generator=random)}
    return conditions | (image if first else {})


def items(count: int, ragged: bool = False) -> list[dict[str, Tensor]]:
    return [item(i % 3 if ragged else 0) for i in range(count)]


class Clips:
    spec = LTX
    arch = ARCH

    def items(self, count, ragged=False):
        return items(count, ragged)


class TestLtx(Clips, EverySuite):
    last_layers = ("ff.2",)
    modulation_operations = ("add",)
    idle = ("seconds",)  # positions have no gradient
    deeper = replace(ARCH, layers=6)
    diffusers = DIFFUSERS


class TestFirstFrame(Conformance):
    """Every other clip begins with an image; the suites of `TestLtx` do without."""

    one_in = 23
    spec = LTX
    arch = replace(ARCH, first_frame=True)
    last_layers = TestLtx.last_layers
    modulation_operations = TestLtx.modulation_operations
    idle = TestLtx.idle

    def items(self, count, ragged=False):
        return [item(i % 3 if ragged else 0, first=i % 2 == 0) for i in range(count)]


OUTSIDE = (
    "embed.proj_in",
    *(f"embed.time_embed.{name}" for name in ("linear_1", "linear_2", "linear")),
    *(f"embed.caption_projection.{name}" for name in ("linear_1", "linear_2")),
    "head.proj_out",
)
"""Layers that are not in blocks."""


class TestDiffusers(Clips, DiffusersChecks):
    diffusers = DIFFUSERS
    parameters: ClassVar = {
        f"{preset}{task}": count
        for task in ("", "_i2v")
        for preset, count in {
            "2b": 1_923_385_472,
            "2b_0.9.5": 1_923_385_472,
            "13b": 13_042_569_344,
            "13b_distilled": 13_042_569_344,
        }.items()
    }
    idle = TestLtx.idle
    converter = (
        "official",
        lambda state: DIFFUSERS.convert(
            {f"model.diffusion_model.{n}": x for n, x in state.items()}
        ),
    )
    """Of files with the prefix that published ones have."""
    targets: ClassVar = {
        "blocks": LTX.adapters.targets["blocks"],
        "every layer": (*LTX.adapters.targets["blocks"], *OUTSIDE),
    }

    def cases(self):
        chosen = {"one": (0,), "alike": (0, 2), "ragged": (0, 1, 2)}
        return {
            f"{name}{', causal' * causal}{', first frame' * first}": Comparison(
                [item(i, causal, first=first and n != 1) for n, i in enumerate(numbers)]
            )
            for name, numbers in chosen.items()
            for causal in (False, True)
            for first in (False, True)
        }

    def exact(self, patch, dtype):
        """Angles of noise levels and positions are thousands of radians, of which fp32 has three
        digits behind the point."""
        from diffusers.models.embeddings import Timesteps

        linspace = torch.linspace

        def wide(*arguments, **options):
            narrow = options.get("dtype") == torch.float32
            return linspace(*arguments, **options | ({"dtype": torch.float64} if narrow else {}))

        patch.setattr(torch, "linspace", wide)
        patch.setattr(
            Timesteps, "forward", lambda self, t: timestep_features(t.double(), self.num_channels)
        )

    def class_arguments(self, arch):
        return config_of(arch)

    def index(self, arch):
        return {"_class_name": "LTXConditionPipeline" if arch.causal else "LTXPipeline"}

    def arch_in_files(self, arch):
        """No file says that it is distilled, and another pipeline begins with an image."""
        return replace(arch, distilled=False, first_frame=False)


def test_architectures_are_those_of_their_files():
    for preset in ("2b", "2b_0.9.5", "13b", "13b_distilled"):
        assert PRESETS[f"{preset}_i2v"] == replace(PRESETS[preset], first_frame=True)
    official = map(to_official, LtxTransformer(ARCH, Precision()).state_dict())
    assert "adaln_single.emb.timestep_embedder.linear_1.weight" in set(official)
    index = {"_class_name": "LTXImageToVideoPipeline"}
    assert arch_from_config(config_of(ARCH), index) == replace(ARCH, first_frame=True)
    for changes, index, said in (
        ({"patch_size": 2}, {"_class_name": "LTXPipeline"}, "patch_size is 2"),
        ({"cross_attention_dim": 32}, {"_class_name": "LTXPipeline"}, "cross_attention_dim is 32"),
        ({}, {}, "no model_index.json names their pipeline"),
    ):
        with pytest.raises(ValueError, match=said):
            arch_from_config(config_of(ARCH) | changes, index)


def test_a_first_frame_is_not_trained_and_has_no_noise():
    clip, image = item(0, first=True), item(0, first=True)
    image = {name: x[:, :1] if name == "latents" else x for name, x in image.items()}
    assert first_frame_mask(clip).flatten().tolist() == [0, 1]
    assert first_frame_mask(item(0)) is None and first_frame_mask(image) is None
    noised = [torch.zeros_like(clip["latents"])] * 2
    inputs = make_inputs(noised, torch.tensor([0.5, 0.75]), [clip, item(0)], 1.0)
    assert torch.equal(inputs.latents[0][:, :1], clip["first_frame"])
    assert not inputs.latents[0][:, 1:].any() and not inputs.latents[1].any()
    assert inputs.sigma.tolist() == [[0, 0.5], [0, 0.75]]
    assert inputs.late.sum(1).tolist() == [20, 40]
    assert make_inputs([image["latents"]], torch.tensor([0.5]), [image], 1.0).late is None


# Captions, latents, samples


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The demo's checkpoint, and the same of a model from 0.9.5 on; tests only read them."""
    folders = {causal: tmp_path_factory.mktemp("demo") / "checkpoint" for causal in (False, True)}
    for causal, folder in folders.items():
        write_checkpoint(folder, causal)
    return folders


def pipeline_of(folder: Path, causal: bool, kind=None, **parts):
    from diffusers import LTXConditionPipeline, LTXPipeline

    kind = kind or (LTXConditionPipeline if causal else LTXPipeline)
    pipeline = kind.from_pretrained(folder, local_files_only=True, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("causal", [False, True])
def test_features_of_captions_are_those_of_the_pipeline(checkpoints, causal):
    """Models up to 0.9.1 do not mask padding in T5. Its features are left out, because the
    transformer masks them."""
    folder = checkpoints[causal]
    spec = LTX.for_arch(replace(DEMO, causal=causal))
    encoder = spec.auxiliary.text_encoder(ModelPaths(base=str(folder)), CPU, torch.float32, "never")
    encoder.load()
    pipeline, num_tokens = pipeline_of(folder, causal, transformer=None, vae=None), 128
    if causal:
        num_tokens = 256
    rows = []
    for caption in ("a red circle on a dark background", "", "a long one, " * 40):
        with torch.no_grad():  # one by one: rounding depends on the shape
            (padded,), (mask,) = pipeline._get_t5_prompt_embeds(
                [caption], max_sequence_length=num_tokens, device=CPU
            )
        (ours,) = encoder.encode([caption])
        assert torch.equal(ours["text"], padded[mask])
        rows.append(len(ours["text"]))
    assert rows[0] > 2 and rows[1:] == [1, num_tokens]
    item = spec.training.empty_item(DEMO, (9, 64, 64), ())
    assert item["text"].shape == (num_tokens, 32)


@pytest.mark.parametrize("frames", [1, 17])
def test_latents_of_clips_are_those_of_the_pipeline(checkpoints, frames):
    from diffusers import AutoencoderKLLTXVideo, LTXPipeline

    vae = AutoencoderKLLTXVideo.from_pretrained(checkpoints[False] / "vae", local_files_only=True)
    encoder = LTX.auxiliary.media_encoder(ModelPaths(base=str(checkpoints[False])), CPU, WHOLE)
    encoder.load()
    clip = torch.rand(3, frames, 64, 96, generator=torch.Generator().manual_seed(3)) * 2 - 1
    with torch.no_grad():
        (ours,) = encoder.encode([clip])
        mode = vae.encode(clip[None]).latent_dist.mode()
        expected = LTXPipeline._normalize_latents(mode, vae.latents_mean, vae.latents_std)
    assert torch.equal(ours["latents"], expected[0])
    assert ours["latents"].shape == (DEMO.in_channels, 1 + frames // 8, 2, 3)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
@pytest.mark.parametrize(
    ("causal", "guidance", "fps", "distilled", "begins"),
    [
        (False, 3.0, 25.0, False, False),
        (False, 1.0, 12.0, False, True),
        (True, 3.0, 30.0, False, True),
        (True, 1.0, 25.0, False, False),
        (True, 1.0, 24.0, True, True),
        # other pairs of the same values
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (False, 3.0, 25.0, False, True),
                (False, 1.0, 12.0, False, False),
                (True, 3.0, 30.0, False, False),
                (True, 1.0, 25.0, False, True),
                (True, 1.0, 24.0, True, False),
            )
        ),
    ],
)
def test_every_step_of_a_sample_is_that_of_the_pipeline(
    checkpoints, causal, guidance, fps, distilled, begins, monkeypatch, tmp_path
):
    """Also its decoding, at a noise level and with noise of the sample's seed; and the first frame,
    to which the pipeline of later models adds noise."""
    from diffusers import LTXImageToVideoPipeline
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    channels = DEMO.in_channels
    arch = replace(
        ARCH, in_channels=channels, causal=causal, distilled=distilled, first_frame=begins
    )
    folder, num_steps = checkpoints[causal], 8 if distilled else 5
    moments = [1000, 993, 987, 981, 975, 909, 725, 0.03] if distilled else None
    spec = LTX.for_arch(arch)
    model, random = make_model(LTX, arch).eval(), torch.Generator().manual_seed(2)
    prompt, negative = ({"text": torch.randn(rows, 32, generator=random)} for rows in (40, 5))
    still = Image.fromarray((torch.rand(64, 96, 3, generator=random) * 255).byte().numpy())
    still.save(tmp_path / "start.png")
    files = {"input_image": str(tmp_path / "start.png")} if begins else {}
    clip = ClipInputs(clip=None, frames=17, height=64, width=96, fps=fps, files=files)
    conditions: dict[str, Tensor] = {}
    for conditioner in spec.auxiliary.conditioners(arch, ModelPaths(base=str(folder)), CPU, WHOLE):
        conditioner.load()
        conditions |= conditioner.encode([clip])[0]
    assert ("first_frame" in conditions) == begins
    job = GenerationRequest(
        conditions=prompt | conditions, negative=negative, frames=17, height=64, width=96,
        steps=num_steps, guidance=guidance, shift=0.0, seed=7,
    )  # fmt: skip
    ours = sample_steps(spec, model, ModelPaths(base=str(folder)), job)
    calls = 2 if guidance > 1 else 1
    kind = LTXImageToVideoPipeline if begins and not causal else None
    pipeline = pipeline_of(
        folder, causal, kind, transformer=DIFFUSERS.transformer(model), text_encoder=None,
        tokenizer=None,
    )  # fmt: skip
    after: list[Tensor] = []

    def keep(pipeline, step, timestep, values):
        after.append(pipeline._unpack_latents(values["latents"], 3, 2, 3)[0])
        return values

    first, last = (
        torch.randn((channels, 3, 2, 3), generator=generator(7, purpose))[None]
        for purpose in ("sample", "decode")
    )
    of_steps, noise = generator(7, "conditions"), [first]
    if begins and causal:  # noise of all tokens, of which the first frame's are used
        for _ in range(num_steps):
            rows = torch.zeros(1, 18, channels)
            drawn = torch.randn((channels, 1, 2, 3), generator=of_steps)
            rows[0, :6] = drawn.flatten(1).T
            noise.append(rows)
    noise.append(last)
    monkeypatch.setattr(
        f"{type(pipeline).__module__}.randn_tensor", lambda shape, **others: noise.pop(0)
    )
    # The pipelines sample the image's latents; ours are the mode, as all latents of data are.
    monkeypatch.setattr(
        DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()
    )
    if begins and not causal:  # draws the noise of the decoder without that function
        monkeypatch.setattr(torch, "randn", lambda *shape, **others: noise.pop(0))
    padded = torch.nn.functional.pad(negative["text"], (0, 0, 0, 35))  # equally long, and masked
    clip = pipeline(
        **({"image": still} if begins else {}),
        prompt_embeds=prompt["text"][None], prompt_attention_mask=torch.ones(1, 40),
        negative_prompt_embeds=padded[None],
        negative_prompt_attention_mask=(torch.arange(40)[None] < 5).float(),
        height=64, width=96, num_frames=17, frame_rate=fps, num_inference_steps=num_steps, timesteps=moments,
        guidance_scale=guidance, decode_timestep=0.05, decode_noise_scale=0.025,
        callback_on_step_end=keep, output_type="pt",
    ).frames[0]  # fmt: skip
    # positions are fp32 in diffusers, too, ours fp64
    assert len(after) == num_steps and noise == []
    check_steps(ours, after, calls=calls, bar=2e-3, frames=slice(int(begins), None))
    if begins:
        assert torch.equal(ours.latents[:, :1], conditions["first_frame"])
        if causal:  # the pipeline's has the noise of the last step, and so has what it decodes
            return
    monkeypatch.undo()
    pixels = ours.sampler.decoder.decode(ours.latents, seed=7)
    torch.testing.assert_close(pixels.transpose(0, 1), clip, atol=2e-3, rtol=0)


def test_the_distilled_model_is_advised_against_and_takes_other_numbers_of_steps():
    assert 'model.preset = "13b"' in LTX.training.advice(PRESETS["13b_distilled"])
    assert all(not LTX.training.advice(arch) for arch in PRESETS.values() if not arch.distilled)
    defaults = LTX.auxiliary.sample_defaults(PRESETS["13b_distilled"])
    assert (defaults.steps, defaults.guided_by) == (8, "nothing")
    eight, four = distilled_levels(1, 8, 0.0), distilled_levels(1, 4, 0.0)
    torch.testing.assert_close(four, eight[::2])
    for steps in (1, 3, 10, 20):
        levels = distilled_levels(1, steps, 0.0)
        assert len(levels) == steps + 1 and (levels.diff() < 0).all()
        assert levels[0] == 1 and levels[-1] == 0


def test_seconds_are_of_the_rate_of_the_data():
    assert seconds_of(17, 16.0, causal=False).tolist() == [0, 0.5, 1]
    assert seconds_of(17, 8.0, causal=True).tolist() == [0, 0.125, 1.125]
    assert seconds_of(1, 0.0, causal=True).tolist() == [0], "a still image"


@pytest.mark.parametrize("module", OUTSIDE[:4])
def test_official_names_are_refused_where_diffusers_does_not_know_them(module):
    with pytest.raises(UserError, match=r"export\.forms"):
        LTX.adapters.check("official", [module])
    LTX.adapters.check("diffusers", [module])
    LTX.adapters.check("official", ["transformer_blocks.0.attn1.to_q", *OUTSIDE[4:]])


class TestRunFiles(RunFileChecks):
    spec = LTX
    folder = Path(__file__).parents[1] / "configs"
    count = 3

    def check(self, config):
        assert config.train.caption_dropout == 0.1, "guidance needs the empty caption"


class TestKeptBytes(KeptBytesConformance):
    spec = LTX
    arch = replace(ARCH, layers=3)
    size = (17, 256, 256)
    wider: ClassVar = {"dim": 512}
    larger = (17, 512, 512)
    daily = (pytest.param("attn_only, 2-2=full", marks=pytest.mark.slow),)
    nightly = ("none", "full", "attn_only")


class TestPlan(FullSizePlanConformance):
    spec = LTX
    preset = "13b"
    size = (97, 512, 768)
    cut = 24


class TestSplit(FullSizeSplitConformance):
    spec = LTX
    preset = "13b"
    size = (97, 512, 768)
    few: ClassVar = {"layers": 4}
    all_blocks = ("full", 3)
    most_apart = 1.1 * 2 * 269e6  # no more than a block

    def crossing(self, arch, cut):
        """Stream, modulation, time, rotary table and text; adapters are behind the stream."""
        return 5, 1


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Demo.write(LTX, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = LTX
    samples = "*.mp4"
    num_samples = range(1, 100)
    trained = "diffusion_model.transformer_blocks.0.attn1.to_q.lora_A.weight"
    trained_names = r"diffusion_model\.transformer_blocks\."


class TestBase(BaseFilesChecks):
    spec = LTX
    most_bytes = 3_600_000

    def test_the_vae_reproduces_other_clips_at_22_db(self, demo: Demo) -> None:
        vae = DiffusersVae(VAE, ModelPaths(base=str(demo.inputs / "checkpoint")), CPU)
        vae.load()
        shown, wrong = {clip.scene for clip in CLIPS}, []
        for number, (way, shape) in enumerate(zip(DIRECTIONS, cycle(SHAPES), strict=False)):
            scene = moving(list(COLOURS)[number % 4], shape, way, 1.3 * number - 9.1)
            assert scene not in shown
            painted = torch.from_numpy(np.round(scene.paint(SIDE, SIDE, range(FRAMES))))
            pixels = painted.float().movedim(-1, 0) / 255
            decoded = vae.decode(vae.encode([pixels * 2 - 1])[0]["latents"])
            wrong.append(float((decoded - pixels).square().mean()))
        assert -10 * np.log10(np.mean(wrong)) >= 22

    def test_words_of_captions_are_orthogonal_and_the_layers_leave_them_alone(
        self, demo: Demo
    ) -> None:
        paths = ModelPaths(base=str(demo.inputs / "checkpoint"))
        encoder = LTX.auxiliary.text_encoder(paths, CPU, torch.float32, "never")
        encoder.load()
        words = encoder.encode(["a red circle moves diagonally on a dark background"])[0]["text"]
        unlike = [0, 1, 2, 3, 4, 5, 7, 8, 9]  # the seventh word is the first one
        expected = words.shape[1] * torch.eye(len(unlike))
        products = words[unlike] @ words[unlike].T
        torch.testing.assert_close(products, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(words[6], words[0], rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_of_clips_that_begin_with_an_image(tmp_path, capsys):
    """The pipeline of its base says so; a prompt may come with another image."""
    demo = Demo.write(LTX, tmp_path)
    index = demo.inputs / "checkpoint" / "model_index.json"
    index.write_text(index.read_text().replace("LTXPipeline", "LTXImageToVideoPipeline"))
    start, other = tmp_path / "start.png", tmp_path / "other.png"
    for image, colour in ((start, (200, 40, 40)), (other, (40, 40, 200))):
        Image.new("RGB", (80, 64), colour).save(image)
    flags = ["--model.base", str(index.parent), "--data.folder", str(demo.inputs / "clips")]
    flags += ["--sample.controls", json.dumps([f"input_image={start}"]), "--log.every_steps", "1"]
    assert demo.train(tmp_path / "run", *flags) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "train.control_dropout = 0: 0% of the samples are trained without first-frame" in said
    assert "agrees with our model" in said
    assert (tmp_path / "cache" / "first-frame").is_dir()
    videos = set()
    for image in (start, other):
        arguments = ["--run", str(tmp_path / "run"), "--prompt", "a red circle"]
        arguments += ["--control", f"input_image={image}", "--out", str(tmp_path / image.stem)]
        assert cli.run(LTX, "sample", arguments) == 0, capsys.readouterr().err
        (video,) = (tmp_path / image.stem).rglob("*.mp4")
        videos.add(video.read_bytes())
    assert len(videos) == 2, "each begins with its image"


@pytest.mark.slow  # minutes
def test_kernels_compute_what_torch_computes_under_every_policy():
    check_kernels(TestLtx)


# and not with those of ranks, which each change waits for: the interpreter takes minutes
@pytest.mark.slow
class TestKernelRanks(KernelRanksConformance):
    """Images of four tokens and of three, an odd number for two ranks that share them."""

    spec = LTX
    arch = replace(ARCH, layers=1)
    cases = ("brief full",)
    more = ("gated_sum", "gated_sum_backward")
    without = ("affine_norm", "affine_norm_backward")

    def items(self, count, ragged=False):
        sizes = (((1, 2, 2), 2), ((1, 1, 3), 3))
        return [
            {
                "latents": clip["latents"][:, : grid[0], : grid[1], : grid[2]].contiguous(),
                "text": clip["text"][:rows],
                "seconds": clip["seconds"][:1],
            }
            for clip, (grid, rows) in zip(items(count), sizes, strict=True)
        ]


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextConformance):
    """Ranks that share the tokens of each sample; text is on every rank."""

    subjects: ClassVar = {
        "odd": Subject(LTX, ARCH, items(1), 2),
        "ragged": Subject(LTX, ARCH, items(3, ragged=True), 2),
        "first frame": Subject(
            LTX,
            replace(ARCH, first_frame=True),
            TestFirstFrame().items(3, ragged=True),
            2,
            gathers=2,
        ),
        "two heads": Subject(LTX, replace(ARCH, heads=2), items(2, ragged=True), 2),
    }


@pytest.mark.exhaustive
class TestTwoDevices(TwoDevicesConformance):
    module = "ditkit_ltx.train"
