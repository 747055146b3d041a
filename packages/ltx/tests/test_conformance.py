"""LTX-Video against every suite of the core, and diffusers: outputs, every gradient, captions,
latents, samples, adapters."""

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files.export import check_export
from ditkit_core.adapters.files.identify import find_adapter
from ditkit_core.adapters.files.write import trained_adapters, write_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.commands import cli
from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.families.first_frame import first_frame_mask
from ditkit_core.io.rng import generator
from ditkit_core.models.conditions import ClipInputs
from ditkit_core.models.encoders import WHOLE, GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.nn.rope import timestep_features
from ditkit_core.run.checks import check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.conformance import Conformance
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
from ditkit_core.testing.conformance_kernel_ranks import KernelRanksConformance
from ditkit_core.testing.conformance_plans import FullSizePlanConformance, KeptBytesConformance
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.demo import Demo
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.run_files import check_schema
from ditkit_core.testing.sampling import generate_latents
from ditkit_core.testing.suites import EverySuite
from ditkit_core.testing.world import make_model
from ditkit_ltx.demo.write import ARCH as DEMO
from ditkit_ltx.demo.write import write_checkpoint
from ditkit_ltx.encoders import seconds_of
from ditkit_ltx.model import LtxTransformer, make_inputs
from ditkit_ltx.presets import PRESETS, LtxArch, arch_from_config, config_of
from ditkit_ltx.spec import LTX, distilled_levels
from ditkit_ltx.state_dict import NAMES, RULES, to_diffusers, to_native, to_official
from ditkit_ltx.verify import DIFFUSERS, diffusers_arguments

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


def relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def loaded(state: dict[str, Tensor], dtype: torch.dtype, *, cast: bool = True) -> LtxTransformer:
    """Our model with weights that have diffusers' names."""
    ours = LtxTransformer(ARCH, Precision(matmul=dtype))
    ours.load_state_dict({to_native(name): tensor.clone() for name, tensor in state.items()})
    return ours.to(dtype) if cast else ours


def diffusers_model(seed: int = 0) -> torch.nn.Module:
    """diffusers' model with random weights, none at an initial one."""
    from diffusers import LTXVideoTransformer3DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LTXVideoTransformer3DModel(**config_of(ARCH))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            small = "norm" in name or parameter.ndim == 1 or "table" in name
            parameter.data = 0.2 * noise if small else noise / parameter.shape[-1] ** 0.5
            if "norm" in name:
                parameter.data += 1
    return model


def exact_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make diffusers run in fp64 where it writes fp32 by hand: its sinusoid, its rotary tables, the
    variance of its norms and the rotation."""
    exact_tables(monkeypatch)
    to = Tensor.to

    def unrounded(self, *arguments, **options):
        arguments = tuple(torch.float64 if x is torch.float32 else x for x in arguments)
        return to(self, *arguments, **options)

    monkeypatch.setattr(Tensor, "to", unrounded)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def exact_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without frequencies in fp32: angles of noise levels and positions are thousands of radians,
    of which fp32 has three digits behind the point."""
    from diffusers.models.embeddings import Timesteps

    linspace = torch.linspace

    def wide(*arguments, **options):
        narrow = options.get("dtype") == torch.float32
        return linspace(*arguments, **options | ({"dtype": torch.float64} if narrow else {}))

    monkeypatch.setattr(torch, "linspace", wide)
    monkeypatch.setattr(
        Timesteps, "forward", lambda self, t: timestep_features(t.double(), self.num_channels)
    )


class Samples:
    """Inputs of both models; latents and text get gradients. diffusers runs one sample at a time:
    what pads a batch in our model changes nothing."""

    def __init__(
        self,
        dtype: torch.dtype,
        chosen: tuple[int, ...],
        causal: bool = False,
        exact: bool = False,
        first: bool = False,
    ):
        """`first`: the samples begin with an image, except for the second of them."""
        drawn = [item(i, causal, first=first and n != 1) for n, i in enumerate(chosen)]
        self.firsts = [
            {name: sample[name].to(dtype) for name in ("first_frame",) if name in sample}
            for sample in drawn
        ]
        random = torch.Generator().manual_seed(1)

        def leaf(values: Tensor) -> Tensor:
            return (values.bfloat16() if exact else values).to(dtype).requires_grad_()

        self.latents, self.text = (
            [leaf(sample[name].double()) for sample in drawn] for name in ("latents", "text")
        )
        self.seconds = [sample["seconds"] for sample in drawn]
        self.target = [
            torch.randn(x.shape, generator=random, dtype=torch.float64)
            for x in (sample["latents"] for sample in drawn)
        ]
        self.dtype = dtype
        self.sigma = torch.tensor([0.8125, 0.25, 0.5], dtype=torch.float64)[list(chosen)]

    def inputs(self, samples: slice):
        texts = [
            {"text": text, "seconds": seconds, **first}
            for text, seconds, first in zip(
                self.text[samples], self.seconds[samples], self.firsts[samples], strict=True
            )
        ]
        return make_inputs(self.latents[samples], self.sigma[samples], texts, 1.0)

    def ours(self, model: LtxTransformer) -> list[Tensor]:
        return model(self.inputs(slice(None)))

    def theirs(self, model: torch.nn.Module) -> list[Tensor]:
        outputs = []
        for i, latents in enumerate(self.latents):
            arguments = diffusers_arguments(self.inputs(slice(i, i + 1)), self.dtype)
            (rows,) = model(**arguments, return_dict=False)[0]
            outputs.append(rows.T.reshape(latents.shape))
        return outputs

    def run(self, outputs: list[Tensor]) -> dict[str, Tensor]:
        """Outputs and the gradients of inputs."""
        sum(
            (out.double() - target).square().sum()
            for out, target in zip(outputs, self.target, strict=True)
        ).backward()
        results = {f"output {i}": out for i, out in enumerate(outputs)}
        for name, tensors in (("latents", self.latents), ("text", self.text)):
            for i, tensor in enumerate(tensors):
                results[f"{name} {i}"], tensor.grad = tensor.grad, None
        return results


def compare(
    ours: LtxTransformer, theirs: torch.nn.Module, samples: Samples, tolerance: float
) -> None:
    mine, them = samples.run(samples.ours(ours)), samples.run(samples.theirs(theirs))
    mine |= {name: parameter.grad for name, parameter in ours.named_parameters()}
    them |= {to_native(name): parameter.grad for name, parameter in theirs.named_parameters()}
    assert mine.keys() == them.keys()
    errors = {name: relative(mine[name], them[name]) for name in mine}
    assert max(errors.values()) <= tolerance, max(errors.items(), key=lambda pair: pair[1])


BATCHES = [(0,), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("first", [False, True], ids=["text", "first frame"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chosen", BATCHES, ids=str)
def test_fp64_equals_diffusers_run_in_fp64(chosen, causal, first, monkeypatch):
    theirs = diffusers_model().double()
    ours = loaded(theirs.state_dict(), torch.float64)
    exact_diffusers(monkeypatch)
    compare(ours, theirs, Samples(torch.float64, chosen, causal, first=first), 1e-10)


@pytest.mark.parametrize("first", [False, True], ids=["text", "first frame"])
@pytest.mark.parametrize("chosen", BATCHES, ids=str)
def test_fp32_equals_diffusers(chosen, first, monkeypatch):
    """1e-5: with exact tables on both sides, the order of summation is all that differs."""
    exact_tables(monkeypatch)
    theirs = diffusers_model()
    compare(
        loaded(theirs.state_dict(), torch.float32),
        theirs,
        Samples(torch.float32, chosen, first=first),
        1e-5,
    )


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


def test_names_and_parameters_are_those_of_diffusers_at_full_size():
    from diffusers import LTXVideoTransformer3DModel
    from diffusers.loaders.single_file_utils import convert_ltx_transformer_checkpoint_to_diffusers

    counts = {"2b": 1_923_385_472, "2b_0.9.5": 1_923_385_472, "13b": 13_042_569_344}
    counts["13b_distilled"] = counts["13b"]
    assert list(PRESETS) == [*counts, *(f"{preset}_i2v" for preset in counts)]
    for preset, count in counts.items():
        arch = PRESETS[preset]
        assert PRESETS[f"{preset}_i2v"] == replace(arch, first_frame=True)
        with torch.device("meta"):
            theirs = LTXVideoTransformer3DModel(**config_of(arch))
            ours = LtxTransformer(arch, Precision()).state_dict()
        assert sum(tensor.numel() for tensor in ours.values()) == count
        shapes = {to_diffusers(name): tensor.shape for name, tensor in ours.items()}
        assert shapes == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
        pipeline = "LTXConditionPipeline" if arch.causal else "LTXPipeline"
        read = arch_from_config(theirs.config, {"_class_name": pipeline})
        assert replace(read, distilled=arch.distilled) == arch, "no file says that it is distilled"
        official = {to_official(name): tensor for name, tensor in ours.items()}
        assert "adaln_single.emb.timestep_embedder.linear_1.weight" in official
        for name in ours:
            assert to_native(to_official(name)) == to_native(to_diffusers(name)) == name
        prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in official.items()}
        converted = convert_ltx_transformer_checkpoint_to_diffusers(prefixed)
        assert {name: tensor.shape for name, tensor in converted.items()} == shapes
    index = {"_class_name": "LTXImageToVideoPipeline"}
    assert arch_from_config(config_of(ARCH), index) == replace(ARCH, first_frame=True)
    for changes, index, said in (
        ({"patch_size": 2}, {"_class_name": "LTXPipeline"}, "patch_size is 2"),
        ({"cross_attention_dim": 32}, {"_class_name": "LTXPipeline"}, "cross_attention_dim is 32"),
        ({}, {}, "no model_index.json names their pipeline"),
    ):
        with pytest.raises(ValueError, match=said):
            arch_from_config(config_of(ARCH) | changes, index)


# bf16


def test_bf16_is_closer_to_fp64_than_diffusers():
    """Equal values of weights and inputs, all parameters of diffusers in bf16. The mean of several
    weights, because one may be lucky: outputs, gradients of inputs, and of all parameters
    together."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(4):
        theirs = diffusers_model(seed)
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16().float()
        exact = loaded(theirs.state_dict(), torch.float64)
        half = loaded(theirs.state_dict(), torch.bfloat16, cast=False)
        for name, parameter in half.named_parameters():
            if not LTX.precision.keep_fp32(name):
                parameter.data = parameter.data.bfloat16()
        results = []
        for dtype, run, model in (
            (torch.float64, "ours", exact),
            (torch.bfloat16, "ours", half),
            (torch.bfloat16, "theirs", theirs.bfloat16()),
        ):
            samples = Samples(dtype, (0, 2), exact=True)
            results.append(samples.run(getattr(samples, run)(model)))
            gradients = {
                to_native(name) if run == "theirs" else name: p.grad
                for name, p in model.named_parameters()
            }
            results[-1]["parameters"] = torch.cat(
                [gradients[name].double().flatten() for name in sorted(gradients)]
            )
        truth, mine, them = results
        for name in truth:
            errors.setdefault(name, []).append(
                (relative(mine[name], truth[name]), relative(them[name], truth[name]))
            )
        assert mine["output 0"].dtype == torch.float32
    for name, pairs in errors.items():
        ours, diffusers = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        assert ours < 0.9 * diffusers, (name, ours, diffusers)


# Samples, captions, latents, adapters


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
    assert ours["latents"].shape == (16, 1 + frames // 8, 2, 3)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
@pytest.mark.parametrize("begins", [False, True], ids=["text", "first frame"])
@pytest.mark.parametrize(
    ("causal", "guidance", "fps", "distilled"),
    [
        (False, 3.0, 25.0, False),
        (False, 1.0, 12.0, False),
        (True, 3.0, 30.0, False),
        (True, 1.0, 25.0, False),
        (True, 1.0, 24.0, True),
    ],
)
def test_every_step_of_a_sample_is_that_of_the_pipeline(
    checkpoints, causal, guidance, fps, distilled, begins, monkeypatch, tmp_path
):
    """Also its decoding, at a noise level and with noise of the sample's seed; and the first frame,
    to which the pipeline of later models adds noise."""
    from diffusers import LTXImageToVideoPipeline
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    arch = replace(ARCH, causal=causal, distilled=distilled, first_frame=begins)
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
    sampler = spec.auxiliary.sampler(ModelPaths(base=str(folder)), CPU, torch.float32, ())
    inputs_of_calls: list[Tensor] = []

    def run(model, inputs):
        inputs_of_calls.append(inputs.latents[0])
        return run_plain(model, inputs)

    with torch.no_grad():
        latents = generate_latents(sampler, job, model, run)
    calls = 2 if guidance > 1 else 1
    assert len(inputs_of_calls) == num_steps * calls
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
        torch.randn((16, 3, 2, 3), generator=generator(7, purpose))[None]
        for purpose in ("sample", "decode")
    )
    of_steps, noise = generator(7, "conditions"), [first]
    if begins and causal:  # noise of all tokens, of which the first frame's are used
        for _ in range(num_steps):
            rows = torch.zeros(1, 18, 16)
            drawn = torch.randn((16, 1, 2, 3), generator=of_steps)
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
    # fp32 in two orders of summation, amplified by guidance; diffusers' noise levels, sinusoid and
    # positions are fp32, ours fp64
    steps = [*inputs_of_calls[calls::calls], latents]
    trained = slice(int(begins), None)
    for ours, theirs in zip(steps, after, strict=True):
        assert (ours - theirs)[:, trained].abs().max() / theirs.std() < 2e-3
    assert (latents - inputs_of_calls[0])[:, trained].abs().max() > 0.5 and noise == []
    if begins:
        assert torch.equal(latents[:, :1], conditions["first_frame"])
        if causal:  # the pipeline's has the noise of the last step, and so has what it decodes
            return
    monkeypatch.undo()
    pixels = sampler.decoder.decode(latents, seed=7)
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


def adapted(**config) -> torch.nn.Module:
    return make_model(LTX, ARCH, adapter=AdapterConfig(rank=3, alpha=6.0, **config)).eval()


def written(model: torch.nn.Module, path: Path, form: str) -> Path:
    adapters = trained_adapters(adapter_layers(model))
    write_adapter(path, adapters, NAMES, form=form, dtype=torch.float32, metadata={})
    return path


OUTSIDE = (
    "embed.proj_in",
    *(f"embed.time_embed.{name}" for name in ("linear_1", "linear_2", "linear")),
    *(f"embed.caption_projection.{name}" for name in ("linear_1", "linear_2")),
    "head.proj_out",
)
LAYERS = LTX.adapters.targets["blocks"]
FILES = {
    "official": ("official", lambda name: name),
    "diffusers": ("diffusers", lambda name: name),
    "diffsynth": ("diffsynth", lambda name: name),
    "musubi": ("musubi", lambda name: name),
    "peft": ("official", lambda name: name.replace("diffusion_model.", "base_model.model.")),
    "no prefix": ("official", lambda name: name.removeprefix("diffusion_model.")),
    "lora_up and lora_down": (
        "official",
        lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),
    ),
}


@pytest.mark.parametrize("alpha", [False, True])
@pytest.mark.parametrize("targets", [LAYERS, (*LAYERS, *OUTSIDE)], ids=["blocks", "every layer"])
@pytest.mark.parametrize("kind", FILES)
def test_what_is_said_of_diffusers_is_what_its_loader_does(tmp_path, kind, targets, alpha):
    """Loaded by the pipeline's own loader, to the outputs of our model."""
    form, rename = FILES[kind]
    model = adapted(targets=targets)
    file = written(model, tmp_path / "adapter.safetensors", form)
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    assert any(name.endswith(".alpha") for name in tensors) == (kind == "musubi")
    if alpha:
        stems = {name.partition(".lora_")[0] for name in tensors if ".lora_" in name}
        tensors |= {f"{stem}.alpha": torch.tensor(3.0) for stem in stems}
    save_file(tensors, file)
    layers = {name: tuple(layer.weight.shape) for name, layer in adapter_layers(model).items()}
    found = find_adapter(file, LTX, layers=layers)
    said = RULES.readers(found.layout, list(found.shapes))["diffusers"]
    try:
        line = DIFFUSERS.verify(file, ModelPaths(transformer="tiny.safetensors"), model, run_plain)
        loads = "agrees with our model" in line
    except UserError as error:
        loads, line = False, str(error)
    assert loads == (said == ""), (said, line)


@pytest.mark.parametrize("module", OUTSIDE[:4])
def test_official_names_are_refused_where_diffusers_does_not_know_them(module):
    with pytest.raises(UserError, match=r"export\.forms"):
        LTX.adapters.check("official", [module])
    LTX.adapters.check("diffusers", [module])
    LTX.adapters.check("official", [f"transformer_blocks.0.{LAYERS[0]}", *OUTSIDE[4:]])


CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("file", [*CONFIGS, LTX.demo.config], ids=lambda file: file.stem)
def test_a_run_file_is_accepted(file):
    config = resolve(RunConfig, file=file)
    check_export(LTX, config.export, config.adapter)
    run = create_run(LTX, replace(config, train=replace(config.train, threads=0)))
    check_training(run)
    assert config.train.caption_dropout == 0.1, "guidance needs the empty caption"


def test_run_files_conform_to_the_schema_next_to_them():
    assert len(CONFIGS) == 3
    check_schema("ditkit_ltx", CONFIGS[0].parent)


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
    daily = slice(0, 1)
    levers = ()
    forms = ("--export.forms", '["official", "diffusers"]')
    init_from = "first_diffusers.safetensors"
    merge_from = "first.safetensors"


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
