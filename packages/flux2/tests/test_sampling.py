"""Our sampler over our model against diffusers' pipelines with the same weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tiny_flux2 import ARCHS, tiny_model
from torch import Tensor

from ditkit_core.adapters.added_adapter import AddedAdapter, adapters_added
from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.inject import adapter_layers, initialise, inject
from ditkit_core.families.euler import EulerSampler
from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import GenerationRequest, VaeMode, decodings_of
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import run_plain
from ditkit_core.testing.sampling import generate_latents
from ditkit_flux2.spec import FLUX2
from ditkit_flux2.verify import DIFFUSERS

CPU = torch.device("cpu")
HEIGHT, WIDTH, STEPS = 48, 32, 3


@pytest.fixture(scope="module")
def vae_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FLUX.2 VAE with statistics of its own."""
    from diffusers import AutoencoderKLFlux2

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLFlux2(
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=4,
        )
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 2)
    folder = tmp_path_factory.mktemp("vae")
    vae.save_pretrained(folder)
    return folder


def euler(paths: ModelPaths, decodings: Sequence[VaeMode]) -> EulerSampler:
    return FLUX2.auxiliary.sampler(paths, CPU, torch.float32, decodings)


@pytest.fixture
def sampler(vae_folder: Path) -> EulerSampler:
    return euler(ModelPaths(vae=str(vae_folder)), ())


def job(references: int = 0, **changes: Any) -> GenerationRequest:
    arch = ARCHS["dev"]

    def noise(name: str, *size: int) -> Tensor:
        return torch.randn(size, generator=generator(name))

    rows = (arch.text_tokens, arch.text_dim)
    pictures = [
        noise(f"reference {i}", arch.in_channels, 1, *((2, 3), (3, 4))[i])
        for i in range(references)
    ]
    defaults: dict[str, Any] = {
        "conditions": {"text": noise("wanted", *rows)}, "negative": {"text": noise("unwanted",
        *rows)}, "references": pictures,
        "frames": 1, "height": HEIGHT, "width": WIDTH, "steps": STEPS, "guidance": 4.0,
        "shift": 0.0, "seed": 7,
    }  # fmt: skip
    return GenerationRequest(**(defaults | changes))


def pipeline_latents(
    kind: str,
    model: Any,
    vae_folder: Path,
    wanted: GenerationRequest,
    adapters: Mapping[Path, float] = MappingProxyType({}),
) -> tuple[Tensor, Tensor]:
    """Latents after each step, and the image in [0, 1], as diffusers' pipeline generates them."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2KleinPipeline,
        Flux2Pipeline,
    )

    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=not wanted.shift, shift=wanted.shift or 3.0, base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256, max_image_seq_len=4096,
    )  # fmt: skip
    parts: dict[str, Any] = {
        "tokenizer": None, "text_encoder": None, "transformer": DIFFUSERS.transformer(model),
        "scheduler": scheduler,
        "vae": AutoencoderKLFlux2.from_pretrained(vae_folder, local_files_only=True).eval(),
    }  # fmt: skip
    extra: dict[str, Any] = {}
    if kind == "dev":
        pipeline: Any = Flux2Pipeline(**parts)
    else:
        pipeline = Flux2KleinPipeline(**parts, is_distilled=kind == "klein")
        assert wanted.negative is not None
        extra["negative_prompt_embeds"] = wanted.negative["text"][None]
    pipeline.set_progress_bar_config(disable=True)
    for file in adapters:
        pipeline.load_lora_weights(str(file), adapter_name=file.stem)
    if adapters:
        pipeline.set_adapters([file.stem for file in adapters], list(adapters.values()))
    pictures = [reference.transpose(0, 1) for reference in wanted.references]
    if pictures:  # diffusers encodes an image; the latents given here go the rest of its way
        ids = pipeline._prepare_image_ids(pictures)
        packed = torch.cat([pipeline._pack_latents(picture) for picture in pictures], 1)
        pipeline.prepare_image_latents = lambda **_: (packed, ids)
        from PIL import Image

        extra["image"] = Image.new("RGB", (64, 64))
    channels = model.embed.arch.in_channels
    noise = torch.randn(
        (channels, 1, HEIGHT // 16, WIDTH // 16), generator=generator(wanted.seed, "sample")
    ).transpose(0, 1)
    after: list[Tensor] = []

    def keep(pipeline: Any, index: int, t: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
        after.append(values["latents"][0].T.unflatten(1, (HEIGHT // 16, WIDTH // 16))[:, None])
        return values

    images = pipeline(
        prompt_embeds=wanted.conditions["text"][None], height=HEIGHT, width=WIDTH,
        num_inference_steps=wanted.steps,
        guidance_scale=wanted.guidance, latents=noise, callback_on_step_end=keep, output_type="pt",
        **extra,
    ).images  # fmt: skip
    return torch.stack(after), images[0][:, None]


@pytest.mark.parametrize(
    ("kind", "references"), [("dev", 0), ("dev", 2), ("klein base", 1), ("klein", 0)]
)
def test_every_step_is_that_of_diffusers(
    sampler: EulerSampler, vae_folder: Path, kind: str, references: int
) -> None:
    model, wanted = tiny_model(kind), job(references)
    seen: list[Tensor] = []

    def run(model: Any, inputs: Any) -> Any:
        seen.append(inputs.latents[0])
        assert inputs.sigma.dtype == torch.float64 and len(inputs.references[0]) == references
        return run_plain(model, inputs)

    steps: list[None] = []
    latents = generate_latents(sampler, wanted, model, run, lambda: steps.append(None))
    expected, picture = pipeline_latents(kind, model, vae_folder, wanted)
    calls = 2 if kind == "klein base" else 1
    assert len(steps) == STEPS and len(seen) == STEPS * calls
    assert latents.dtype == torch.float32 and latents.shape == (16, 1, 3, 2)
    # fp32 in two orders of summation, amplified by guidance; diffusers' noise levels and sinusoid
    # are fp32, ours fp64
    for ours, theirs in zip([*seen[calls::calls], latents], expected, strict=True):
        assert (ours - theirs).abs().max() / theirs.std() < 1e-4
    assert (latents - seen[0]).abs().max() > 0.5

    pixels = sampler.decoder.decode(latents)
    assert pixels.shape == (3, 1, HEIGHT, WIDTH)
    torch.testing.assert_close(pixels, picture, atol=1e-4, rtol=0)


# two adapters are what is asked for
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize(
    ("added_kind", "strength"), [pytest.param("lora", 0.7, marks=pytest.mark.slow), ("dora", 1.0)]
)
def test_an_added_adapter_over_a_trained_one_is_what_diffusers_makes_of_both(
    sampler: EulerSampler, vae_folder: Path, tmp_path: Path, added_kind: str, strength: float
) -> None:
    written, kind = ExportConfig(dtype="fp32", forms=("diffusers",)), "klein base"
    files, model = [], tiny_model(kind)
    shapes = {
        name: tuple(m.weight.shape)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    for name, rank in (("fast", 3), ("trained", 4)):
        model = tiny_model(kind)
        adapter = AdapterConfig(rank=rank, use_dora=name == "fast" and added_kind == "dora")
        inject(model, adapter, FLUX2.adapters.targets)
        initialise(model, rank, device_of=lambda _: CPU)
        for module, layer in adapter_layers(model).items():
            up = layer.lora_B["default"].weight
            up.data = torch.randn(up.shape, generator=generator("up", module, rank)) / 4
        files += export_adapter(model.eval(), FLUX2, tmp_path, name, written, metadata={})
    fast = AddedAdapter(open_adapter(files[0], FLUX2.architecture.names, shapes), strength)
    alone = generate_latents(sampler, job(), model, run_plain)
    with torch.no_grad(), adapters_added(model, [fast], lambda name: torch.float32):
        latents = generate_latents(sampler, job(), model, run_plain)
    # First, because peft scales what earlier adapters added with a DoRA's factors too.
    files_of_both = {files[0]: strength, files[1]: 1.0}
    expected, _ = pipeline_latents(kind, tiny_model(kind), vae_folder, job(), files_of_both)
    # as without adapters: fp32 in two orders of summation, amplified by guidance
    assert (latents - expected[-1]).abs().max() / expected[-1].std() < 1e-4
    assert (latents - alone).abs().max() / expected[-1].std() > 0.05


def test_a_constant_shift_is_that_of_diffusers(sampler: EulerSampler, vae_folder: Path) -> None:
    model, wanted = tiny_model("klein"), job(shift=2.0)
    latents = generate_latents(sampler, wanted, model, run_plain)
    expected, _ = pipeline_latents("klein", model, vae_folder, wanted)
    assert (latents - expected[-1]).abs().max() / expected[-1].std() < 1e-4
    assert not torch.equal(latents, generate_latents(sampler, job(), model, run_plain))


@pytest.mark.parametrize(("kind", "calls"), [("dev", 1), ("klein base", 2), ("klein", 1)])
def test_guidance_is_what_the_architecture_makes_of_it(
    sampler: EulerSampler, kind: str, calls: int
) -> None:
    model, given = tiny_model(kind), []

    def run(model: Any, inputs: Any) -> Any:
        given.append(float(inputs.guidance))
        return run_plain(model, inputs)

    def sampled(**changes: Any) -> Tensor:
        given.clear()
        return generate_latents(sampler, job(**changes), model, run)

    strong = sampled()
    assert given == [4.0] * STEPS * calls
    weak = sampled(guidance=1.0)
    assert len(given) == STEPS
    assert torch.equal(strong, weak) == (kind == "klein")
    alone = sampled(negative=None)
    assert len(given) == STEPS and torch.equal(alone, strong if kind != "klein base" else weak)


def test_seed_and_references_decide_the_image(sampler: EulerSampler) -> None:
    model = tiny_model("klein")

    def sampled(references: int = 0, **changes: Any) -> Tensor:
        return generate_latents(sampler, job(references, **changes), model, run_plain)

    first = sampled()
    assert torch.equal(first, sampled()) and not torch.equal(first, sampled(seed=8))
    assert not torch.equal(first, sampled(1)) and not torch.equal(sampled(1), sampled(2))
    swapped = dataclasses.replace(job(2), references=job(2).references[::-1])
    assert not torch.equal(sampled(2), generate_latents(sampler, swapped, model, run_plain))


def test_bf16_decodes_almost_what_fp32_does_and_takes_over_where_memory_lacks(
    vae_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, latents = (
        ModelPaths(vae=str(vae_folder)),
        torch.randn(16, 1, 8, 8, generator=generator("latents")),
    )
    exact, rounded = (
        euler(paths, [VaeMode(dtype)]).decoder.decode(latents)
        for dtype in (torch.float32, torch.bfloat16)
    )
    error = (exact - rounded).abs()
    # measured: 0.03 and 50 dB, of random weights; 8 bits are rounded in each of some thirty layers
    assert 0 < error.max() < 0.1 and -10 * torch.log10(error.square().mean()) > 43
    sampler = euler(paths, decodings_of("auto", tiled=False))
    work, failures = sampler.decoder.decode_clip, [torch.OutOfMemoryError("CUDA out of memory")]

    def decode(*given: Any) -> Tensor:
        if failures:
            raise failures.pop()
        return work(*given)

    monkeypatch.setattr(sampler.decoder, "decode_clip", decode)
    assert torch.equal(sampler.decoder.decode(latents), rounded) and not failures
