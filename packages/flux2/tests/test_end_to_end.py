"""The demo is the real path on generated inputs: from pictures and editing pairs to an adapter that diffusers loads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from ditkit_core import cli
from ditkit_flux2.spec import FLUX2

FEW = ("--train.steps", "2", "--held_out.clips", "1", "--sample.captions", "1", "--sample.steps", "2")

BOTH = ("--export.forms", '["official", "diffusers"]')


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's inputs, and a cache that the tests share: written and encoded once."""
    folder = tmp_path_factory.mktemp("demo") / "inputs"
    FLUX2.write_demo(folder)
    return folder


def train(run: Path, inputs: Path, *flags: str) -> int:
    """The demo with its inputs copied instead of made again."""
    spec = replace(FLUX2, write_demo=lambda folder: shutil.copytree(inputs, folder, dirs_exist_ok=True))
    cache = ("--encode.cache", str(inputs.parent / "cache"), "--log.tensorboard", "false")
    return cli.run(spec, "train", ["--demo", "--run.folder", str(run), *cache, *FEW, *flags])


def test_the_demo_ends_with_a_verified_adapter_samples_and_metrics(inputs, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["--demo", "--run.folder", str(run), "--encode.cache", str(inputs.parent / "cache"), *FEW]
    assert cli.run(FLUX2, "train", arguments) == 0
    said = capsys.readouterr().out
    assert "diffusers loads adapter.safetensors and agrees with our model" in said
    assert list((run / "samples").glob("*.png")) and list((run / "tensorboard").iterdir())
    tensors = load_file(run / "exports" / "adapter.safetensors")
    assert "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight" in tensors
    assert all("_blocks." in name for name in tensors)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[0] == 0
    assert cli.run(FLUX2, "train", arguments) == 0
    assert "complete at step 2" in capsys.readouterr().out
    assert cli.run(FLUX2, "train", [*arguments, "--train.steps", "3"]) == 0
    assert (run / "state" / "step-000003").is_dir()


def test_diffusers_pipeline_draws_with_the_adapter_what_it_draws_with_our_weights(inputs, tmp_path):
    """The adapter, loaded as a user would, against the same adapter merged into the transformer that we export."""
    from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel

    run = tmp_path / "run"
    assert train(run, inputs, "--export.merged", "true", "--export.dtype", "fp32", "--optim.lr", "0.1", *BOTH) == 0
    base = run / "inputs" / "checkpoint"
    merged = run / "exports" / "transformer_diffusers"

    def drawn(**parts):
        pipeline = Flux2KleinPipeline.from_pretrained(base, local_files_only=True, **parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline, lambda: torch.from_numpy(
            pipeline(
                prompt="make the red circle blue", image=Image.new("RGB", (64, 64), "red"), height=64, width=96,
                num_inference_steps=2, guidance_scale=2.0, generator=torch.Generator().manual_seed(0), output_type="np",
            ).images
        )  # fmt: skip

    pipeline, draw = drawn()
    plain = draw()
    ours = drawn(transformer=Flux2Transformer2DModel.from_pretrained(merged, local_files_only=True))[1]()
    # fp32 pictures in [0, 1]; a merged weight is rounded once where the adapter's product is added afterwards
    for name in ("adapter.safetensors", "adapter_diffusers.safetensors"):
        pipeline.load_lora_weights(run / "exports" / name)
        torch.testing.assert_close(draw(), ours, rtol=0, atol=1e-4)
        pipeline.unload_lora_weights()
    assert torch.equal(draw(), plain) and (plain - ours).abs().max() > 1e-2


def test_a_run_that_was_continued_is_the_run_that_was_not(inputs, tmp_path):
    flags = ("--sample.captions", "0", "--export.dtype", "fp32")
    assert train(tmp_path / "whole", inputs, *flags, "--train.steps", "3") == 0
    for steps in ("1", "3"):
        assert train(tmp_path / "parts", inputs, *flags, "--train.steps", steps) == 0
    whole, parts = (load_file(tmp_path / run / "exports" / "adapter.safetensors") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_a_run_draws_from_a_prompt_and_from_a_picture_to_edit(inputs, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(run, inputs, "--sample.captions", "0") == 0
    pictures = run / "inputs" / "pictures"
    given = ["--run", str(run), "--prompt", "make the red circle blue", "--sample.steps", "2"]
    assert cli.run(FLUX2, "sample", [*given, "--out", str(tmp_path / "plain")]) == 0
    edit = ["--reference", str(pictures / "references" / "edit01.png"), "--sample.images", "2"]
    assert cli.run(FLUX2, "sample", [*given, *edit, "--out", str(tmp_path / "edited")]) == 0
    (plain,) = (tmp_path / "plain").glob("*.png")
    edited = sorted((tmp_path / "edited").glob("*.png"))
    sizes = {}
    for path in [plain, *edited]:
        with Image.open(path) as image:
            sizes[path.name] = image.size
    assert sizes[plain.name] == (128, 128)
    assert len(edited) == 3 and sum("grid" in path.name for path in edited) == 1
    assert {size for name, size in sizes.items() if "seed" in name} == {(160, 96)}, "the shape of the reference"


@pytest.mark.parametrize(
    "flags",
    [
        ("--model.dtype", "bf16", "--train.checkpointing", "attn_only", "--adapter.dropout", "0.1"),
        ("--train.checkpointing", "full", "--adapter.method", "full", "--optim.lr", "1e-4", "--export.forms", '["diffusers"]'),
        ("--adapter.use_dora", "true", "--export.forms", '["diffusers"]', "--train.caption_dropout", "0.5"),
        ("--export.forms", '["official", "diffusers"]', "--export.dtype", "fp32", "--adapter.use_rslora", "true"),
        ("--adapter.targets", '["modulation"]', "--adapter.alpha", "3", "--export.forms", '["diffusers"]'),
        ("--data.buckets", "false", "--train.batch_tokens", "1300", "--train.batch_size", "1", "--sample.guidance", "1"),
        ("--prior.prompt", "a circle", "--prior.images", "2", "--prior.weight", "0.5"),
    ],
)  # fmt: skip
def test_the_demo_takes_every_lever(inputs, tmp_path, capsys, flags):
    assert train(tmp_path / "run", inputs, *flags) == 0, capsys.readouterr().err
    assert list((tmp_path / "run" / "exports").iterdir())


def test_a_distilled_base_is_warned_about(inputs, tmp_path, capsys):
    distilled = tmp_path / "distilled"
    shutil.copytree(inputs, distilled)
    index = distilled / "checkpoint" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))
    assert train(tmp_path / "run", distilled, "--encode.cache", str(inputs.parent / "cache")) == 0
    assert "train its base model instead" in capsys.readouterr().err


def test_an_adapter_trained_here_starts_and_merges_into_another_run(inputs, tmp_path, capsys):
    assert train(tmp_path / "first", inputs, *BOTH) == 0
    official, diffusers = (
        tmp_path / "first" / "exports" / name for name in ("adapter.safetensors", "adapter_diffusers.safetensors")
    )
    assert train(tmp_path / "second", inputs, "--adapter.init", str(diffusers), "--train.steps", "0", *BOTH) == 0
    for file in (official, diffusers):
        again = load_file(tmp_path / "second" / "exports" / file.name)
        assert all(torch.equal(tensor, again[name]) for name, tensor in load_file(file).items())
    assert train(tmp_path / "third", inputs, "--base.merge", f'["{official.as_posix()}@0.5"]') == 0
    assert "at strength 0.5" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_demo_lowers_the_held_out_loss_by_a_fifth(tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.run(FLUX2, "train", ["--demo", "--run.folder", str(run)]) == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [record["held_out"] for record in records if "held_out" in record]
    assert held_out[-1] <= 0.8 * held_out[0]
    assert len(list((run / "samples").glob("*.png"))) >= 2
