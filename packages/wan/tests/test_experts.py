"""Wan 2.2's two experts: which steps are whose, by the official sampler's timesteps; trained,
sampled with and exported against diffusers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from safetensors.torch import load_file

from ditkit_core.commands import cli
from ditkit_core.config.resolve import resolve
from ditkit_core.families.demo_motions import CLIPS, write_clip
from ditkit_core.io.rng import generator
from ditkit_core.models.encoders import GenerationRequest
from ditkit_core.previews.stages import denoiser_stages, trained_weights_in
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.experts import noise_range
from ditkit_core.run.jobs import jobs_of
from ditkit_core.sampling.denoise import generate
from ditkit_core.training.flow_matching import shift_sigma, sigma_at
from ditkit_wan.demo.write import write_checkpoint
from ditkit_wan.encoders.text import TextEncoder
from ditkit_wan.model.inputs import make_inputs
from ditkit_wan.presets import PRESETS
from ditkit_wan.sampling import WanSampler
from ditkit_wan.spec import WAN

MODELS = {"t2v-a14b": 0.875, "i2v-a14b": 0.900}
CAPTIONS = ["a red circle moves right on a dark background", "a blue square moves left"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each pair; tests only read it."""
    folders = {name: tmp_path_factory.mktemp(name) / "checkpoint" for name in MODELS}
    for name, folder in folders.items():
        write_checkpoint(folder, CAPTIONS, name)
    return folders


# Which noise levels are whose


@pytest.mark.parametrize("flow_shift", [12.0, 5.0])
@pytest.mark.parametrize("name", MODELS)
def test_each_step_of_the_official_sampler_goes_to_the_expert_that_was_trained_on_it(
    name: str, flow_shift: float
) -> None:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=flow_shift,
    )
    scheduler.set_timesteps(40)
    assert scheduler.timesteps.dtype == torch.int64
    high, low = WAN.architecture.experts(PRESETS[name])
    counts = [0, 0]
    for t in scheduler.timesteps:
        # the official rule: from the boundary on it is the high-noise expert's
        is_low = bool(t < MODELS[name] * 1000)
        lowest, highest = noise_range(low if is_low else high)
        level = float(t) / 1000  # what the sampler yields
        assert (level < high.min_sigma) == is_low, "as drawing decides"
        assert lowest <= torch.tensor(level).item() <= highest, "as training restricts"
        counts[is_low] += 1
    assert min(counts) >= 5


@pytest.mark.parametrize("name", MODELS)
def test_every_timestep_of_training_and_of_sampling_has_the_same_expert(name: str) -> None:
    """All thousand whole timesteps, those at the boundary among them: 875 is the high-noise
    expert's of text to video alone."""
    high, low = WAN.architecture.experts(PRESETS[name])
    for t in range(1001):
        sigma = torch.tensor(t / 1000)
        is_high = noise_range(high)[0] <= float(sigma) <= 1
        assert is_high != (0 <= float(sigma) <= noise_range(low)[1])
        assert is_high == (t >= 1000 * MODELS[name]) == (t / 1000 >= high.min_sigma)


@pytest.mark.parametrize(("name", "fraction"), [("t2v-a14b", 0.417), ("i2v-a14b", 0.358)])
def test_the_shares_at_shift_5_are_those_that_diffsynth_is_given(
    name: str, fraction: float
) -> None:
    """Its 1000-step table at shift 5: the first index below the boundary is 417, and 358."""
    table = 1000 * shift_sigma(torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1], 5.0)
    index = int((table >= 1000 * MODELS[name]).sum())
    assert index / 1000 == fraction
    draws = sigma_at(
        (torch.arange(100_000) + 0.5) / 100_000,
        create_run(WAN, RunConfig(), PRESETS[name]).config.flow,
        5.0,
    )
    high, _ = WAN.architecture.experts(PRESETS[name])
    assert abs(float((draws >= noise_range(high)[0]).double().mean()) - fraction) < 1e-3


def test_a_timestep_next_to_the_boundary_is_not_rounded_over_it() -> None:
    """In bf16 DiffSynth's last low-noise timestep, 874.85, is 876: the low-noise expert is trained
    on the other's."""
    trap = torch.tensor(874.8467)
    assert float(trap.bfloat16()) == 876.0
    _, low = WAN.architecture.experts(PRESETS["t2v-a14b"])
    item = {"latents": torch.zeros(16, 1, 2, 2), "text": torch.zeros(2, 8)}
    for sigma in (float(trap) / 1000, noise_range(low)[1]):
        timestep = make_inputs([item["latents"]], torch.tensor([sigma]), [item], 1.0).timestep
        assert timestep.dtype == torch.float32 and 874.8 < float(timestep) < 875


def test_boundaries_guidance_and_parts_are_each_models_own(checkpoints: dict[str, Path]) -> None:
    for name, boundary in MODELS.items():
        for arch in (PRESETS[name], create_run(WAN, _config(checkpoints[name])).arch):
            high, low = WAN.architecture.experts(arch)
            assert (high.name, high.part, low.name, low.part) == (
                "high_noise",
                "transformer",
                "low_noise",
                "transformer_2",
            )
            assert (low.max_sigma, high.min_sigma, low.min_sigma, high.max_sigma) == (
                boundary,
                boundary,
                0,
                1,
            )
            assert (high.guidance, low.guidance) == {
                "t2v-a14b": (4.0, 3.0),
                "i2v-a14b": (3.5, 3.5),
            }[name]
    assert not any(
        WAN.architecture.experts(arch)
        for name, arch in PRESETS.items()
        if not name.endswith("a14b")
    )


def _config(base: Path, **model: str) -> RunConfig:
    return resolve(
        RunConfig,
        flags={
            "model.base": str(base),
            **{f"model.{name}": value for name, value in model.items()},
        },
    )


def test_a_checkpoints_own_boundary_wins_over_the_published_one(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoints["t2v-a14b"], tmp_path / "base")
    index = tmp_path / "base" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"boundary_ratio": 0.8}))
    high, low = (
        job.run.config.flow for job in jobs_of(create_run(WAN, _config(tmp_path / "base")))
    )
    assert float(np.float32(high.min_sigma)) == high.min_sigma and abs(high.min_sigma - 0.8) < 1e-7
    assert high.max_sigma == 1 and low.min_sigma == 0 and 0.7999 < low.max_sigma < high.min_sigma


@pytest.mark.parametrize(
    ("transformer", "transformer_2", "fits"),
    [
        (
            "wan2.2_t2v_high_noise_14B_fp16.safetensors",
            "wan2.2_t2v_low_noise_14B_fp16.safetensors",
            True,
        ),
        (
            "wan2.2_t2v_low_noise_14B_fp16.safetensors",
            "wan2.2_t2v_high_noise_14B_fp16.safetensors",
            False,
        ),
        ("Wan2.2-T2V-A14B/high_noise_model", "Wan2.2-T2V-A14B/low_noise_model", True),
        ("Wan2.2-T2V-A14B/low_noise_model", "Wan2.2-T2V-A14B/high_noise_model", False),
    ],
)
def test_which_file_is_which_by_the_names_that_people_have(
    transformer: str, transformer_2: str, fits: bool
) -> None:
    flags = {
        "model.preset": "t2v-a14b",
        "model.transformer": transformer,
        "model.transformer_2": transformer_2,
    }
    config = resolve(RunConfig, flags=flags)
    if fits:
        assert [job.run.component for job in jobs_of(create_run(WAN, config))] == [
            "transformer",
            "transformer_2",
        ]
        return
    with pytest.raises(Exception, match="named after the low_noise expert") as raised:
        create_run(WAN, config)
    assert "\n" not in str(raised.value)


# The commands


@pytest.fixture(scope="module")
def trained(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of both experts of text to video."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "clips").mkdir()
    for index in range(3):
        write_clip(folder / "clips" / f"{index}.mp4", CLIPS[index])
        (folder / "clips" / f"{index}.txt").write_text(CAPTIONS[index % 2])
    flags = {
        "run.folder": folder / "run", "model.base": checkpoints["t2v-a14b"], "model.dtype": "fp32",
        "data.folder": folder / "clips",
        "data.frames": 5, "data.height": 32, "data.width": 48, "encode.text_dtype": "fp32",
        "experts.rank": "[2, 4]",
        "optim.lr": 5e-2, "train.steps": 3, "export.forms": '["official", "diffusers"]',
        "export.dtype": "fp32", "sample.captions": 1, "sample.steps": 4,
        "train.threads": 1, "log.tensorboard": "false",
    }  # fmt: skip
    assert cli.run(WAN, "train", [f"--{key}={value}" for key, value in flags.items()]) == 0
    return folder / "run"


@pytest.mark.slow
def test_both_experts_are_trained_verified_and_sampled_with(trained: Path) -> None:
    for name, rank in (("high_noise", 2), ("low_noise", 4)):
        for form in ("", "_diffusers"):
            tensors = load_file(trained / "exports" / f"run_{name}{form}.safetensors")
            downs = [
                tensor for key, tensor in tensors.items() if "lora_A" in key or "lora_down" in key
            ]
            assert downs and {len(tensor) for tensor in downs} == {rank}
        assert (trained / name / "metrics.jsonl").exists()
    assert list((trained / "samples").glob("step-000003-0-*.mp4"))


@pytest.mark.slow
@pytest.mark.parametrize("with_adapters", [False, True])
def test_a_sample_over_the_boundary_is_that_of_diffusers(
    trained: Path, checkpoints: dict[str, Path], with_adapters: bool
) -> None:
    """The whole chain at once: which file is which, the boundary, guidance of each, the scheduler's
    history across, the exported files."""
    base = checkpoints["t2v-a14b"]
    run = create_run(WAN, resolve(RunConfig, stored=trained))
    encoder = TextEncoder(run.config.model, torch.device("cpu"), torch.float32)
    encoder.load()
    wanted, unwanted = encoder.encode([CAPTIONS[0]])[0], encoder.encode([""])[0]
    job = GenerationRequest(
        conditions=wanted, negative=unwanted, frames=5, height=32, width=48, steps=6, guidance=1.0,
        shift=5.0, seed=7
    )  # fmt: skip
    turns = denoiser_stages(run, trained_weights_in(jobs_of(run))[0] if with_adapters else {})
    sampler = run.auxiliary.sampler
    assert isinstance(sampler, WanSampler)
    (pixels,) = generate(sampler, [job], turns)

    pipeline = WanPipeline.from_pretrained(base, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = UniPCMultistepScheduler.from_config(
        pipeline.scheduler.config, flow_shift=5.0
    )
    if with_adapters:
        exports = trained / "exports"
        pipeline.load_lora_weights(
            str(exports / "run_high_noise_diffusers.safetensors"), adapter_name="high"
        )
        pipeline.load_lora_weights(
            str(exports / "run_low_noise_diffusers.safetensors"),
            adapter_name="low",
            load_into_transformer_2=True,
        )
    noise = torch.randn((1, 16, 2, 4, 6), generator=generator(7, "sample"))
    asked: dict[str, Any] = {
        "prompt": CAPTIONS[0], "negative_prompt": "", "height": 32, "width": 48, "num_frames": 5,
        "num_inference_steps": 6,
        "guidance_scale": 4.0, "guidance_scale_2": 3.0,
    }  # fmt: skip
    timesteps: list[float] = []

    def at_end(pipe: Any, i: int, t: Any, given: dict[str, Any]) -> dict[str, Any]:
        timesteps.append(float(t))
        return {}

    video = pipeline(**asked, latents=noise, output_type="np", callback_on_step_end=at_end).frames[
        0
    ]
    assert any(t >= 875 for t in timesteps) and sum(t < 875 for t in timesteps) >= 2, (
        "it goes over the boundary"
    )
    expected = torch.from_numpy(video).permute(3, 0, 1, 2)
    torch.testing.assert_close(pixels, expected, atol=2e-3 if with_adapters else 2e-4, rtol=0)
    if with_adapters:
        (bare,) = generate(sampler, [job], denoiser_stages(run, {}))
        assert (bare - pixels).abs().max() > 0.02, "or the adapters would prove nothing"


def test_one_adapter_in_both_experts_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that keeps one LoRA over two bases has files that look alike: each is refused in
    the other's place."""
    high = tmp_path / "run_high_noise.safetensors"
    high.touch()
    flags = ["--model.base", str(checkpoints["t2v-a14b"]), "--run.folder", str(tmp_path / "run")]
    flags += [f"--adapter={high}", f"--adapter-low={high}", "--prompt=a"]
    assert cli.run(WAN, "sample", flags) == 1
    assert "--adapter-low = " in (refused := capsys.readouterr().err), refused
    assert "is named after the high_noise expert, and this is the low_noise one" in refused


def test_image_to_video_trains_on_its_own_boundary(checkpoints: dict[str, Path]) -> None:
    high, low = (job.run for job in jobs_of(create_run(WAN, _config(checkpoints["i2v-a14b"]))))
    assert 0.8999 < low.config.flow.max_sigma < 0.9 and abs(high.config.flow.min_sigma - 0.9) < 1e-7
    assert high.config.flow.min_sigma > 0.88, "not text to video's"
    only = create_run(WAN, replace(_config(checkpoints["i2v-a14b"]), experts=high.config.experts))
    assert only.config.flow == high.config.flow and only.component == "transformer"
