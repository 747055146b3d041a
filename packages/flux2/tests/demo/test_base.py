"""The weights that the demo starts from: small, in every installation, and a VAE that reproduces
images that it has not seen."""

from itertools import product

import pytest
import torch

from ditkit_core.data.media.synthetic import COLOURS, SHAPES
from ditkit_core.families.demo_edits import EXAMPLES
from ditkit_core.families.demo_places import HELD_OUT, KNOWN, NEW, VALIDATED
from ditkit_core.testing.demo import check_separate_words, decibels_of_places
from ditkit_flux2.demo.write import WEIGHTS
from ditkit_flux2.encoders import VAE


def test_the_files_take_less_than_3_mb():
    sizes = {file.name: file.stat().st_size for file in WEIGHTS.iterdir()}
    assert (
        set(sizes) == {"vae.safetensors", "transformer.safetensors"}
        and sum(sizes.values()) < 3_000_000
    )


def test_the_vae_reproduces_other_images_at_30_db(checkpoint):
    assert decibels_of_places(VAE, checkpoint) >= 30


def test_the_new_place_is_shown_without_what_is_held_out_and_as_often_as_the_known_ones():
    described = [
        each.image
        for each in EXAMPLES
        if not each.references and each.image not in VALIDATED.values()
    ]
    new = {(image.colour, image.shape) for image in described if image.position == NEW}
    assert new == set(product(COLOURS, SHAPES)) - set(HELD_OUT)
    assert (
        sum(image.position == NEW for image in described)
        == sum(image.position in KNOWN for image in described)
        == 12
    )


def test_words_of_captions_are_orthogonal_and_the_layers_leave_them_alone(checkpoint):
    check_separate_words(checkpoint, (9, 27))


@pytest.mark.parametrize("part", ["vae", "transformer"])
def test_the_checkpoint_has_the_trained_weights(checkpoint, part):
    from safetensors.torch import load_file

    stored = load_file(WEIGHTS / f"{part}.safetensors")
    written = load_file(checkpoint / part / "diffusion_pytorch_model.safetensors")
    assert stored.keys() == written.keys() and all(
        torch.equal(written[name], each) for name, each in stored.items()
    )
