"""The demo is the real path on generated inputs: from images and editing pairs to an adapter that
diffusers loads."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from ditkit_core.commands import cli
from ditkit_core.testing.conformance_audit import check_demo
from ditkit_core.testing.conformance_demo import DemoConformance
from ditkit_core.testing.demo import Demo
from ditkit_flux2.spec import FLUX2

BOTH = ("--export.forms", '["official", "diffusers"]')


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo.write(FLUX2, tmp_path_factory.mktemp("demo"))


class TestDemo(DemoConformance):
    spec = FLUX2
    num_samples = range(2, 1000)
    trained = "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight"
    trained_names = r".*_blocks\."
    daily = slice(0, None, 2)
    default = slice(1)
    levers = (
        (
            "--adapter.targets",
            '["modulation"]',
            "--adapter.alpha",
            "3",
            "--export.forms",
            '["diffusers"]',
        ),
        (
            "--data.buckets",
            "false",
            "--train.batch_tokens",
            "1300",
            "--train.batch_size",
            "1",
            "--sample.guidance",
            "1",
        ),
    )

    @pytest.mark.exhaustive  # each change trains Wan under masks
    def test_the_demo_is_trained_under_masks(self, demo, tmp_path, capsys):
        super().test_the_demo_is_trained_under_masks(demo, tmp_path, capsys)


@pytest.mark.slow
def test_diffusers_pipeline_samples_with_the_adapter_what_it_samples_with_our_weights(
    demo, tmp_path
):
    """The adapter, loaded as a user would, against the same adapter merged into the transformer
    that we export."""
    from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel

    run = tmp_path / "run"
    assert (
        demo.train(
            run, "--export.merged", "true", "--export.dtype", "fp32", "--optim.lr", "0.1", *BOTH
        )
        == 0
    )
    base = run / "inputs" / "checkpoint"
    merged = run / "exports" / "transformer_diffusers"

    def pipeline_of(**parts):
        pipeline = Flux2KleinPipeline.from_pretrained(base, local_files_only=True, **parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline, lambda: torch.from_numpy(
            pipeline(
                prompt="make the red circle blue", image=Image.new("RGB", (64, 64), "red"),
                height=64, width=96,
                num_inference_steps=2, guidance_scale=2.0,
                generator=torch.Generator().manual_seed(0), output_type="np",
            ).images
        )  # fmt: skip

    pipeline, sample = pipeline_of()
    plain = sample()
    ours = pipeline_of(
        transformer=Flux2Transformer2DModel.from_pretrained(merged, local_files_only=True)
    )[1]()
    # fp32 images in [0, 1]; a merged weight is rounded once where the adapter's product is added
    # afterwards
    for name in ("run.safetensors", "run_diffusers.safetensors"):
        pipeline.load_lora_weights(run / "exports" / name)
        torch.testing.assert_close(sample(), ours, rtol=0, atol=1e-4)
        pipeline.unload_lora_weights()
    assert torch.equal(sample(), plain) and (plain - ours).abs().max() > 1e-2


@pytest.mark.slow
def test_a_run_that_was_continued_is_the_run_that_was_not(demo, tmp_path):
    """With buckets, several captions, dropout and references, which the demo has, and all else that
    decides what a step sees."""
    flags = (
        "--sample.captions",
        "0",
        "--export.dtype",
        "fp32",
        "--train.batch_tokens",
        "1300",
        "--train.batch_size",
        "1",
    )
    flags += ("--train.accumulation", "2", "--prior.prompt", "a circle", "--prior.images", "2")
    flags += ("--prior.weight", "0.5", "--ema.decay", "0.9")
    assert demo.train(tmp_path / "whole", *flags, "--train.steps", "2") == 0
    for steps in ("1", "2"):
        assert demo.train(tmp_path / "parts", *flags, "--train.steps", steps) == 0
    whole, parts = (
        load_file(tmp_path / run / "exports" / f"{run}.safetensors") for run in ("whole", "parts")
    )
    assert whole.keys() == parts.keys() and all(
        torch.equal(tensor, parts[name]) for name, tensor in whole.items()
    )


@pytest.mark.slow
def test_a_run_samples_from_a_prompt_and_from_an_image_to_edit(demo, tmp_path, capsys):
    run = tmp_path / "run"
    assert demo.train(run, "--sample.captions", "0") == 0
    wide = tmp_path / "wide.png"
    Image.new("RGB", (160, 96), "navy").save(wide)
    given = ["--run", str(run), "--prompt", "make the red circle blue", "--sample.steps", "2"]
    assert cli.run(FLUX2, "sample", [*given, "--out", str(tmp_path / "plain")]) == 0
    edit = ["--reference", str(wide), "--sample.images", "2"]
    assert cli.run(FLUX2, "sample", [*given, *edit, "--out", str(tmp_path / "edited")]) == 0
    (plain,) = (tmp_path / "plain").glob("*.png")
    edited = sorted((tmp_path / "edited").glob("*.png"))
    sizes = {}
    for path in [plain, *edited]:
        with Image.open(path) as image:
            sizes[path.name] = image.size
    assert sizes[plain.name] == (64, 64)
    assert len(edited) == 3 and sum("grid" in path.name for path in edited) == 1
    assert {size for name, size in sizes.items() if "seed" in name} == {(80, 48)}, (
        "the shape of the reference"
    )


def test_a_distilled_base_is_warned_about(demo, tmp_path, capsys):
    distilled = tmp_path / "distilled"
    shutil.copytree(demo.inputs, distilled)
    index = distilled / "checkpoint" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": True}))
    assert (
        replace(demo, inputs=distilled).train(
            tmp_path / "run", "--train.steps", "0", "--sample.captions", "0"
        )
        == 0
    )
    assert "train its base model instead" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_the_demo_is_audited(demo, tmp_path, capsys):
    check_demo(demo, tmp_path / "run")
    assert "what matters most: timestep, which this run has in fp64" in capsys.readouterr().out
