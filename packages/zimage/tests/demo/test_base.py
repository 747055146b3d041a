"""The weights that the demo starts from: small, in every installation, and a VAE that reproduces
images that it has not seen."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ditkit_core.testing.demo import check_separate_words, decibels_of_places
from ditkit_zimage.demo.write import WEIGHTS, write_checkpoint
from ditkit_zimage.spec import VAE, ZIMAGE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "checkpoint"
    write_checkpoint(folder)
    return folder


def test_the_files_take_less_than_3_2_mb_and_the_demo_counts_as_trained() -> None:
    sizes = {file.name: file.stat().st_size for file in WEIGHTS.iterdir()}
    assert (
        set(sizes) == {"vae.safetensors", "transformer.safetensors"}
        and sum(sizes.values()) < 3_200_000
    )
    assert ZIMAGE.demo.trained_base


def test_the_vae_reproduces_other_images_at_30_db(checkpoint: Path) -> None:
    assert decibels_of_places(VAE, checkpoint) >= 30


def test_words_of_captions_are_orthogonal_and_the_layers_leave_them_alone(checkpoint: Path) -> None:
    check_separate_words(checkpoint, (1, 2))


@pytest.mark.parametrize("part", ["vae", "transformer"])
def test_the_checkpoint_has_the_trained_weights(checkpoint: Path, part: str) -> None:
    stored = load_file(WEIGHTS / f"{part}.safetensors")
    written = load_file(checkpoint / part / "diffusion_pytorch_model.safetensors")
    assert stored.keys() == written.keys()
    assert all(torch.equal(written[name], each.float()) for name, each in stored.items())
