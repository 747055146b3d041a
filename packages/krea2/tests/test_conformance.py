"""Krea 2 against every suite of the core, and diffusers: outputs, every gradient, captions,
samples, adapters."""

import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.files.export import check_export
from ditkit_core.adapters.files.identify import find_adapter
from ditkit_core.adapters.files.write import trained_adapters, write_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.nn.rope import timestep_features
from ditkit_core.run.checks import check_training
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.sampling.config import SampleConfig
from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.conformance_full_size_split import FullSizeSplitConformance
from ditkit_core.testing.conformance_kernel_ranks import KernelRanksConformance
from ditkit_core.testing.conformance_plans import FullSizePlanConformance, KeptBytesConformance
from ditkit_core.testing.conformance_routing import RoutingChecks
from ditkit_core.testing.conformance_two_devices import TwoDevicesConformance
from ditkit_core.testing.context_steps import Subject
from ditkit_core.testing.demo import Demo, TrainedBaseChecks
from ditkit_core.testing.kernel_conformance import check_kernels
from ditkit_core.testing.run_files import check_schema
from ditkit_core.testing.sampling import generate_latents
from ditkit_core.testing.suites import EverySuite
from ditkit_core.testing.world import make_model
from ditkit_krea2.demo.write import write_checkpoint
from ditkit_krea2.encoders import PREFIX_TOKENS, TEXT, TEXT_TOKENS, VAE
from ditkit_krea2.model import Krea2Transformer, make_inputs
from ditkit_krea2.presets import PRESETS, Krea2Arch, arch_from_config, config_of
from ditkit_krea2.spec import KREA2
from ditkit_krea2.state_dict import NAMES, RULES, to_diffusers, to_native, to_official
from ditkit_krea2.verify import DIFFUSERS, diffusers_arguments

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


def relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).norm() / theirs.norm())


def loaded(state: dict[str, Tensor], dtype: torch.dtype, *, cast: bool = True) -> Krea2Transformer:
    """Our model with weights that have diffusers' names."""
    ours = Krea2Transformer(ARCH, Precision(matmul=dtype))
    ours.load_state_dict({to_native(name): tensor.clone() for name, tensor in state.items()})
    return ours.to(dtype) if cast else ours


def diffusers_model(seed: int = 0) -> torch.nn.Module:
    """diffusers' model with random weights, none at an initial one."""
    from diffusers import Krea2Transformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Krea2Transformer2DModel(**config_of(ARCH))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            small = "norm" in name or parameter.ndim == 1 or "table" in name
            parameter.data = 0.2 * noise if small else noise / parameter.shape[-1] ** 0.5
    return model


def exact_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make diffusers run in fp64 where it writes fp32 by hand: `.float()`, its sinusoid, and rotary
    tables."""
    exact_sinusoid(monkeypatch)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def exact_sinusoid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the embedding's frequencies and products in fp32."""
    from diffusers.models.transformers.transformer_krea2 import Krea2TimestepEmbedding

    def forward(self, timestep: Tensor, dtype: torch.dtype) -> Tensor:
        features = timestep_features(1000 * timestep.double(), self.embed_dim).to(dtype)
        hidden = torch.nn.functional.gelu(self.linear_1(features[:, None]), approximate="tanh")
        return self.linear_2(hidden)

    monkeypatch.setattr(Krea2TimestepEmbedding, "forward", forward)


class Samples:
    """Inputs of both models; latents and text get gradients. diffusers runs one sample at a time:
    what pads a batch in our model changes nothing."""

    def __init__(self, dtype: torch.dtype, chosen: tuple[int, ...], exact: bool = False):
        random = torch.Generator().manual_seed(1)

        def draw(*size: int) -> Tensor:
            values = torch.randn(size, generator=random, dtype=torch.float64)
            return (values.bfloat16() if exact else values).to(dtype).requires_grad_()

        drawn = [
            (draw(4, 1, *grid), draw(rows, WIDTH), draw(4, 1, *grid).detach())
            for grid, rows in zip(GRIDS, CAPTIONS, strict=True)
        ]
        self.dtype = dtype
        self.latents, self.text, self.target = (
            list(x) for x in zip(*(drawn[i] for i in chosen), strict=True)
        )
        self.sigma = torch.tensor([0.8125, 0.25, 0.5], dtype=torch.float64)[list(chosen)]

    def ours(self, model: Krea2Transformer) -> list[Tensor]:
        texts = [{"text": text} for text in self.text]
        return model(make_inputs(self.latents, self.sigma, texts, 1.0))

    def theirs(self, model: torch.nn.Module) -> list[Tensor]:
        outputs = []
        for latents, text, sigma in zip(self.latents, self.text, self.sigma, strict=True):
            inputs = make_inputs([latents], sigma[None], [{"text": text}], 1.0)
            arguments = diffusers_arguments(inputs, ARCH.text_layers, self.dtype)
            (rows,) = model(**arguments, return_dict=False)[0]
            _, _, height, width = latents.shape
            rows = rows.view(height // 2, width // 2, 4, 2, 2).permute(2, 0, 3, 1, 4)
            outputs.append(rows.reshape(4, 1, height, width))
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
    ours: Krea2Transformer, theirs: torch.nn.Module, samples: Samples, tolerance: float
) -> None:
    mine, them = samples.run(samples.ours(ours)), samples.run(samples.theirs(theirs))
    mine |= {name: parameter.grad for name, parameter in ours.named_parameters()}
    them |= {to_native(name): parameter.grad for name, parameter in theirs.named_parameters()}
    assert mine.keys() == them.keys()
    errors = {name: relative(mine[name], them[name]) for name in mine}
    assert max(errors.values()) <= tolerance, max(errors.items(), key=lambda pair: pair[1])


BATCHES = [(0,), (0, 2), (0, 1, 2)]


@pytest.mark.parametrize("chosen", BATCHES, ids=str)
def test_fp64_equals_diffusers_run_in_fp64(chosen, monkeypatch):
    theirs = diffusers_model().double()
    ours = loaded(theirs.state_dict(), torch.float64)
    exact_diffusers(monkeypatch)
    compare(ours, theirs, Samples(torch.float64, chosen), 1e-10)


@pytest.mark.parametrize("chosen", BATCHES, ids=str)
def test_fp32_equals_diffusers(chosen, monkeypatch):
    """1e-5: with one sinusoid on both sides, the order of summation is all that differs."""
    exact_sinusoid(monkeypatch)
    theirs = diffusers_model()
    compare(
        loaded(theirs.state_dict(), torch.float32), theirs, Samples(torch.float32, chosen), 1e-5
    )


def test_names_and_parameters_are_those_of_diffusers_at_full_size():
    from diffusers import Krea2Transformer2DModel
    from diffusers.loaders.single_file_utils import (
        convert_krea2_transformer_checkpoint_to_diffusers,
    )

    with torch.device("meta"):
        theirs = Krea2Transformer2DModel().state_dict()
        for preset, arch in PRESETS.items():
            ours = Krea2Transformer(arch, Precision()).state_dict()
            assert sum(tensor.numel() for tensor in ours.values()) == 12_820_073_036
            shapes = {to_diffusers(name): tensor.shape for name, tensor in ours.items()}
            assert shapes == {name: tensor.shape for name, tensor in theirs.items()}, preset
            assert arch_from_config(config_of(arch), {"is_distilled": arch.distilled}) == arch
    official: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        assert to_native(to_official(name)) == to_native(to_diffusers(name)) == name
        official |= NAMES.stored("official", to_official(name), tensor)
    assert official["blocks.0.mod.lin"].shape == (6 * 6144,)
    converted = convert_krea2_transformer_checkpoint_to_diffusers(official)
    assert {name: tensor.shape for name, tensor in converted.items()} == shapes


# bf16


def test_bf16_is_closer_to_fp64_than_diffusers():
    """Equal values of weights and inputs; diffusers as `from_pretrained(torch_dtype=bf16)` leaves
    it, with norms in fp32. The mean of several weights, because one may be lucky: outputs,
    gradients of inputs, and of all parameters together."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(4):
        theirs = diffusers_model(seed)
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16().float()
        exact = loaded(theirs.state_dict(), torch.float64)
        half = loaded(theirs.state_dict(), torch.bfloat16, cast=False)
        for name, parameter in half.named_parameters():
            if not KREA2.precision.keep_fp32(name):
                parameter.data = parameter.data.bfloat16()
        for name, parameter in theirs.named_parameters():
            if not any(part.startswith("norm") for part in name.split(".")):
                parameter.data = parameter.data.bfloat16()
        results = []
        for dtype, run, model in (
            (torch.float64, "ours", exact),
            (torch.bfloat16, "ours", half),
            (torch.bfloat16, "theirs", theirs),
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


# Samples, captions, adapters


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
        torch.testing.assert_close(
            ours["text"].view_as(expected), expected, rtol=1e-4, atol=1e-4
        )  # fp32; kernels sum in another order
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
    sampler = KREA2.auxiliary.sampler(ModelPaths(base=str(checkpoint)), CPU, torch.float32, ())
    inputs_of_calls: list[Tensor] = []

    def run(model, inputs):
        inputs_of_calls.append(inputs.latents[0])
        return run_plain(model, inputs)

    with torch.no_grad():
        latents = generate_latents(sampler, job, model, run)
    calls = 2 if (kind, guidance) == ("base", 5.5) else 1
    assert len(inputs_of_calls) == 3 * calls
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

    noise = torch.randn((16, 1, 6, 8), generator=generator(7, "sample"))
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
    # fp32 in two orders of summation, amplified by guidance; diffusers' noise levels and sinusoid
    # are fp32, ours fp64
    steps = [*inputs_of_calls[calls::calls], latents]
    for ours, theirs in zip(steps, after, strict=True):
        assert (ours - theirs).abs().max() / theirs.std() < 2e-4
    assert (latents - inputs_of_calls[0]).abs().max() > 0.5
    torch.testing.assert_close(sampler.decoder.decode(latents)[:, 0], image, atol=2e-4, rtol=0)


def adapted(**config) -> torch.nn.Module:
    return make_model(KREA2, ARCH, adapter=AdapterConfig(rank=3, alpha=6.0, **config)).eval()


def written(model: torch.nn.Module, path: Path, form: str) -> Path:
    adapters = trained_adapters(adapter_layers(model))
    write_adapter(path, adapters, NAMES, form=form, dtype=torch.float32, metadata={})
    return path


LAYERS = (
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
@pytest.mark.parametrize("kind", FILES)
def test_what_is_said_of_diffusers_is_what_its_loader_does(tmp_path, kind, alpha):
    """An adapter on every layer, loaded by the pipeline's own loader, to the outputs of our model;
    with keys of alpha it is rejected, so none of our forms for it has them."""
    form, rename = FILES[kind]
    model = adapted(targets=LAYERS)
    file = written(model, tmp_path / "adapter.safetensors", form)
    tensors = {rename(name): tensor for name, tensor in load_file(file).items()}
    assert any(name.endswith(".alpha") for name in tensors) == (kind == "musubi")
    if alpha:
        stems = {name.partition(".lora_")[0] for name in tensors if ".lora_" in name}
        tensors |= {f"{stem}.alpha": torch.tensor(3.0) for stem in stems}
    save_file(tensors, file)
    layers = {name: tuple(layer.weight.shape) for name, layer in adapter_layers(model).items()}
    found = find_adapter(file, KREA2, layers=layers)
    said = RULES.readers(found.layout, list(found.shapes))["diffusers"]
    try:
        loads = "agrees with our model" in DIFFUSERS.verify(
            file, ModelPaths(transformer="tiny.safetensors"), model, run_plain
        )
    except UserError:
        loads = False
    assert loads == (said == ""), said
    assert loads == (kind in ("official", "diffusers", "peft") and not alpha)


CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))


@pytest.mark.parametrize("file", [*CONFIGS, KREA2.demo.config], ids=lambda file: file.stem)
def test_a_run_file_is_accepted(file):
    config = resolve(RunConfig, file=file)
    check_export(KREA2, config.export, config.adapter)
    run = create_run(KREA2, replace(config, train=replace(config.train, threads=0)))
    check_training(run)
    assert config.model.preset != "distilled" and config.train.caption_dropout == 0.1, (
        "the base is trained, and its guidance needs the empty caption"
    )


def test_run_files_conform_to_the_schema_next_to_them():
    assert len(CONFIGS) == 2
    check_schema("ditkit_krea2", CONFIGS[0].parent)


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
    samples = "*.png"
    num_samples = range(1, 100)
    trained = "diffusion_model.blocks.0.attn.wq.lora_A.weight"
    trained_names = r"diffusion_model\.(blocks|txtfusion)\."
    daily = slice(0, 1)
    levers = ()
    forms = ("--export.forms", '["official", "diffusers"]')
    init_from = "first_diffusers.safetensors"
    merge_from = "first.safetensors"


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

    outputs = 2e-6
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
