"""The demo's inputs: whole, the same every time, readable by the libraries and by our own
reader."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ditkit_core.config.resolve import resolve
from ditkit_core.data.dataset import scan
from ditkit_core.data.media.clip import read_clip
from ditkit_core.encoding.loader import split_held_out
from ditkit_core.errors import UserError
from ditkit_core.families.demo_edits import EXAMPLES
from ditkit_core.families.demo_places import NEW, VALIDATED, render
from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.families.vae import DiffusersVae
from ditkit_core.io.files import file_hash
from ditkit_core.models.paths import ModelPaths
from ditkit_core.run.config import RunConfig
from ditkit_flux2.demo.write import TEXT_DIM, WIDTH, write_demo
from ditkit_flux2.encoders import TEXT, VAE
from ditkit_flux2.presets import arch_from_config
from ditkit_flux2.spec import FLUX2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "inputs"
    write_demo(folder)
    return folder


@pytest.fixture(scope="module")
def dataset(inputs: Path):
    data = resolve(RunConfig, file=FLUX2.demo.config).data
    return scan(replace(data, folder=str(inputs / "images"), frames=1), FLUX2.data)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): file_hash(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_two_writings_are_the_same_bytes_and_the_random_state_is_untouched(inputs, tmp_path):
    before = torch.random.get_rng_state()
    write_demo(tmp_path / "again")
    assert torch.equal(before, torch.random.get_rng_state())
    written = hashes(inputs)
    assert written == hashes(tmp_path / "again") and len(written) > 40


def test_every_part_of_the_checkpoint_is_safetensors_and_loads_as_a_pipeline(inputs):
    from diffusers import DiffusionPipeline, Flux2KleinPipeline

    weights = {file.parent.name for file in (inputs / "checkpoint").rglob("*.safetensors")}
    assert weights == {"transformer", "vae", "text_encoder"}
    assert not [
        file for file in inputs.rglob("*") if file.suffix in (".bin", ".pth", ".pt", ".pkl")
    ]
    pipeline = DiffusionPipeline.from_pretrained(inputs / "checkpoint", local_files_only=True)
    assert type(pipeline) is Flux2KleinPipeline and pipeline.config.is_distilled is False
    pipeline.set_progress_bar_config(disable=True)
    arguments = {
        "height": 32,
        "width": 48,
        "num_inference_steps": 2,
        "guidance_scale": 2.0,
        "output_type": "np",
    }
    pictures = pipeline(
        prompt="a red circle", generator=torch.Generator().manual_seed(0), **arguments
    ).images
    assert pictures.shape == (1, 32, 48, 3) and np.isfinite(pictures).all() and pictures.std() > 0


def test_the_text_encoder_gives_what_the_pipeline_gives(checkpoint):
    """The tokenizer's own chat template, which the pipeline renders, says what our encoder writes
    out."""
    from diffusers import Flux2KleinPipeline

    pipeline = Flux2KleinPipeline.from_pretrained(
        checkpoint, local_files_only=True, transformer=None, vae=None, scheduler=None
    )
    encoder = LanguageModelEncoder(
        TEXT, ModelPaths(base=str(checkpoint)), torch.device("cpu"), torch.float32
    )
    encoder.load()
    caption = "a red circle on a mat"
    (ours,) = encoder.encode([caption])
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt(caption)
    assert ours["text"].shape == (512, 3 * TEXT_DIM)
    # both fp32 through 27 layers; their last bits differ with the kernel that each picks for
    # attention
    torch.testing.assert_close(ours["text"], theirs[0], rtol=1e-4, atol=1e-4)


def test_the_tokenizer_knows_the_captions_words_and_spells_others(inputs):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        inputs / "checkpoint" / "tokenizer", local_files_only=True
    )
    for caption in (caption for example in EXAMPLES for caption in example.captions):
        first, *others = caption.split()
        assert tokenizer.tokenize(caption) == [*first, *(f"Ġ{word}" for word in others)]
    assert tokenizer.decode(tokenizer("a drake, ½ asleep").input_ids) == "a drake, ½ asleep"


def test_the_images_are_of_many_sizes_and_both_kinds_of_file(inputs):
    seen = set()
    for example in EXAMPLES:
        for name, picture in ((example.file, example.image), *example.references):
            with Image.open(inputs / "images" / name) as image:
                seen.add((image.format, image.size))
                # JPEG halves the resolution of colour and rounds: the shapes stay what they were
                assert np.abs(np.array(image).astype(float) - render(picture)).mean() < (
                    0.1 if image.format == "PNG" else 3
                )
    assert {format for format, _ in seen} == {"PNG", "JPEG"} and len(seen) > 8


def test_our_reader_finds_buckets_several_captions_and_editing_pairs(inputs, dataset):
    samples = dataset.samples
    assert len(samples) == len(EXAMPLES) == 36 and not dataset.excluded
    assert {(sample.height, sample.width) for sample in samples} == {(64, 64), (48, 80), (80, 48)}
    assert {len(sample.captions) for sample in samples} == {1, 2}
    edits = [sample for sample in samples if sample.references]
    assert len(edits) == 6 and all(
        sample.captions[0].startswith(("make the ", "turn the ")) for sample in edits
    )
    assert {len(sample.references) for sample in edits} == {1}


def test_the_validation_images_are_of_the_new_place_but_one_and_no_image_is_trained_on_under_another_name(
    dataset,
):
    clips = resolve(RunConfig, file=FLUX2.demo.config).held_out.clips
    trained, held_out = split_held_out([sample.id for sample in dataset.samples], clips)
    images = {Path(example.file).stem: example.image for example in EXAMPLES}
    assert {f"picture{number}" for number in VALIDATED} < set(held_out) and len(held_out) == 9
    assert sum(images[name].position == NEW for name in held_out) == 8
    assert not {images[name] for name in held_out} & {images[name] for name in trained}


def test_an_edit_changes_what_its_instruction_names_and_nothing_else():
    for example in EXAMPLES:
        for _, before in example.references:
            after = example.image
            changed = [
                name
                for name in ("colour", "shape", "position")
                if getattr(before, name) != getattr(after, name)
            ]
            assert (
                len(changed) == 1
                and replace(before, **{changed[0]: getattr(after, changed[0])}) == after
            )
            (caption,) = example.captions
            assert caption.endswith(f" {getattr(after, changed[0])}")


def test_latents_of_the_images_as_training_reads_them_have_about_unit_variance(inputs, dataset):
    encoder = DiffusersVae(VAE, ModelPaths(base=str(inputs / "checkpoint")), torch.device("cpu"))
    encoder.load()
    latents = []
    for sample in dataset.samples:
        pixels = read_clip(
            sample.media, frames=1, fps=1.0, height=sample.height, width=sample.width
        )
        latents.append(encoder.encode([pixels])[0]["latents"])
        assert latents[-1].shape == (64, 1, sample.height // 16, sample.width // 16)
    together = torch.cat([each.flatten(1) for each in latents], dim=1)
    deviation = together.std(dim=1)
    assert together.mean().abs() < 0.2 and 0.7 < deviation.min() and deviation.max() < 1.4


def test_the_checkpoints_architecture_is_found(checkpoint):
    config = json.loads((checkpoint / "transformer" / "config.json").read_text())
    arch = arch_from_config(config, json.loads((checkpoint / "model_index.json").read_text()))
    assert (arch.dim, arch.double_layers, arch.single_layers, arch.text_dim) == (
        WIDTH,
        1,
        4,
        3 * TEXT_DIM,
    )
    assert not arch.guidance and not arch.distilled


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "inputs").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot write the demo") as caught:
        write_demo(tmp_path / "inputs")
    assert "\n" not in str(caught.value)
