"""Our sampler over our model against diffusers' pipeline with the same weights."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ditkit_core.adapters.added_adapter import AddedAdapter, adapters_added
from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.models.spec import build_on_meta
from ditkit_core.testing.sampling import generate_latents
from ditkit_wan.encoders.text import TextEncoder
from ditkit_wan.sampling import WanSampler
from ditkit_wan.spec import WAN

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    """Our transformer with the checkpoint's weights, in fp32, trained in full: no adapter, no
    peft."""
    components = ModelPaths(base=str(checkpoint), dtype="fp32")
    precision = Precision(matmul=torch.float32)
    unloaded = model_on_meta(
        WAN, components, AdapterConfig(method="full"), BaseConfig(), precision=precision
    )
    return load_weights(unloaded, placement=place_blocks(unloaded.module, [CPU]), seed=0).module


@pytest.fixture(scope="module")
def job(checkpoint: Path) -> GenerationRequest:
    encoder = TextEncoder(ModelPaths(base=str(checkpoint)), CPU, torch.float32)
    encoder.load()
    return GenerationRequest(
        conditions=encoder.encode(["a red circle"])[0], negative=encoder.encode(["blue"])[0],
        frames=5, height=32, width=48,
        steps=3, guidance=4.0, shift=0.0, seed=7,
    )  # fmt: skip


def diffusers_pipeline(checkpoint: Path) -> Any:
    from diffusers import WanPipeline

    pipeline = WanPipeline.from_pretrained(checkpoint, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_three_guided_steps_are_those_of_diffusers(
    checkpoint: Path, model: Any, job: GenerationRequest
) -> None:
    sampler = WanSampler(ModelPaths(base=str(checkpoint)), CPU)
    steps: list[None] = []
    latents = generate_latents(sampler, job, model, run_plain, lambda: steps.append(None))
    noise = torch.randn((1, 16, 2, 4, 6), generator=generator(7, "sample"))
    pipeline = diffusers_pipeline(checkpoint)
    arguments = {
        "prompt": "a red circle", "negative_prompt": "blue", "height": 32, "width": 48,
        "num_frames": 5,
        "num_inference_steps": 3, "guidance_scale": 4.0,
    }  # fmt: skip
    expected = pipeline(**arguments, latents=noise, output_type="latent").frames[0]
    # fp32 in two orders of summation, amplified by guidance; diffusers' sinusoid is fp32 where ours
    # is fp64
    assert latents.dtype == torch.float32 and latents.shape == (16, 2, 4, 6) and len(steps) == 3
    assert (latents - expected).abs().max() / expected.std() < 1e-4
    assert (latents - noise[0]).abs().max() > 0.5

    pixels = sampler.decoder.decode(latents)
    video = torch.from_numpy(
        pipeline(**arguments, latents=noise, output_type="np").frames[0]
    ).permute(3, 0, 1, 2)
    assert pixels.shape == (3, 5, 32, 48) and pixels.device == CPU
    torch.testing.assert_close(pixels, video, atol=1e-4, rtol=0)


def adapted(checkpoint: Path, rank: int, *, use_dora: bool = False) -> Any:
    """The checkpoint's transformer with an adapter of random values."""
    components, precision = (
        ModelPaths(base=str(checkpoint), dtype="fp32"),
        Precision(matmul=torch.float32),
    )
    adapter = AdapterConfig(rank=rank, use_dora=use_dora)
    unloaded = model_on_meta(WAN, components, adapter, BaseConfig(), precision=precision)
    model = load_weights(unloaded, placement=place_blocks(unloaded.module, [CPU]), seed=rank).module
    for name, layer in adapter_layers(model).items():
        up = layer.lora_B["default"].weight
        up.data = torch.randn(up.shape, generator=generator("up", name, rank)) / 4
    return model.eval()


# two adapters are what is asked for
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize(
    ("kind", "strength"), [("lora", 0.7), pytest.param("dora", 1.0, marks=pytest.mark.slow)]
)
def test_an_added_adapter_over_a_trained_one_is_what_diffusers_makes_of_both(
    checkpoint: Path, job: GenerationRequest, tmp_path: Path, kind: str, strength: float
) -> None:
    model, other = adapted(checkpoint, 4), adapted(checkpoint, 3, use_dora=kind == "dora")
    written = ExportConfig(dtype="fp32", forms=("diffusers",))
    files = [
        export_adapter(each, WAN, tmp_path, name, written, metadata={})[0]
        for each, name in ((model, "trained"), (other, "fast"))
    ]
    bare = build_on_meta(WAN, model.embed.arch, Precision(matmul=torch.float32))
    shapes = {
        name: tuple(m.weight.shape)
        for name, m in bare.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    fast = AddedAdapter(open_adapter(files[1], WAN.architecture.names, shapes), strength)
    sampler = WanSampler(ModelPaths(base=str(checkpoint)), CPU)
    alone = generate_latents(sampler, job, model, run_plain)
    with torch.no_grad(), adapters_added(model, [fast], lambda name: torch.float32):
        latents = generate_latents(sampler, job, model, run_plain)
    assert torch.equal(alone, generate_latents(sampler, job, model, run_plain)), (
        "nothing of it stays"
    )

    pipeline = diffusers_pipeline(checkpoint)
    for file in files:
        pipeline.load_lora_weights(str(file), adapter_name=file.stem.removesuffix("_diffusers"))
    # First, because peft scales what earlier adapters added with a DoRA's factors too.
    pipeline.set_adapters(["fast", "trained"], [strength, 1.0])
    noise = torch.randn((1, 16, 2, 4, 6), generator=generator(7, "sample"))
    expected = pipeline(
        prompt="a red circle", negative_prompt="blue", height=32, width=48, num_frames=5,
        num_inference_steps=3,
        guidance_scale=4.0, latents=noise, output_type="latent",
    ).frames[0]  # fmt: skip
    # as without adapters: fp32 in two orders of summation, amplified by guidance
    assert (latents - expected).abs().max() / expected.std() < 1e-4
    assert (latents - alone).abs().max() / expected.std() > 0.05


def test_without_guidance_the_model_is_called_once_a_step(
    checkpoint: Path, model: Any, job: GenerationRequest
) -> None:
    sampler = WanSampler(ModelPaths(base=str(checkpoint)), CPU)
    times: list[float] = []

    def run(model: Any, inputs: Any) -> Any:
        times.append(inputs.timestep.item())
        return run_plain(model, inputs)

    def sampled(**changes: Any) -> torch.Tensor:
        times.clear()
        return generate_latents(sampler, dataclasses.replace(job, **changes), model, run)

    plain = sampled(guidance=1.0)
    assert len(times) == 3 and all(time == round(time) for time in times) and times[0] == 999
    assert torch.equal(plain, sampled(negative=None)) and len(times) == 3
    guided = sampled()
    assert len(times) == 6 and not torch.equal(plain, guided)


def test_a_seed_decides_the_sample_and_shift_the_noise_levels(
    checkpoint: Path, model: Any, job: GenerationRequest
) -> None:
    sampler = WanSampler(ModelPaths(base=str(checkpoint)), CPU)

    def sampled(**changes: Any) -> torch.Tensor:
        return generate_latents(
            sampler, dataclasses.replace(job, guidance=1.0, **changes), model, run_plain
        )

    first = sampled()
    # 3 is the checkpoint's own
    assert torch.equal(first, sampled()) and torch.equal(first, sampled(shift=3.0))
    assert not torch.equal(first, sampled(seed=8)) and not torch.equal(first, sampled(shift=8.0))


def test_a_checkpoints_scheduler_decides_the_shift(
    checkpoint: Path, tmp_path: Path, model: Any, job: GenerationRequest
) -> None:
    shutil.copytree(checkpoint, tmp_path / "base")
    file = tmp_path / "base" / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"flow_shift": 8.0}))
    theirs, ours = (
        WanSampler(ModelPaths(base=str(base)), CPU) for base in (tmp_path / "base", checkpoint)
    )
    explicit = generate_latents(ours, dataclasses.replace(job, shift=8.0), model, run_plain)
    assert torch.equal(generate_latents(theirs, job, model, run_plain), explicit)
    file.write_text("{")
    with pytest.raises(UserError, match="scheduler_config.json"):
        WanSampler(ModelPaths(base=str(tmp_path / "base")), CPU)


def test_a_single_file_vae_needs_no_scheduler_folder(
    checkpoint: Path, model: Any, job: GenerationRequest
) -> None:
    alone = WanSampler(ModelPaths(vae=str(checkpoint / "vae")), CPU)
    with_base = WanSampler(ModelPaths(base=str(checkpoint)), CPU)
    job = dataclasses.replace(job, guidance=1.0)
    # without a checkpoint's configuration the shift is the official 5
    expected = generate_latents(with_base, dataclasses.replace(job, shift=5.0), model, run_plain)
    assert torch.equal(generate_latents(alone, job, model, run_plain), expected)
