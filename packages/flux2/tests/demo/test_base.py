"""The weights that the demo starts from: small, in every installation, and a VAE that reproduces images that it has not seen."""

from itertools import product

import numpy as np
import pytest
import torch

from ditkit_core.data.media.synthetic import COLOURS, SHAPES
from ditkit_core.families.vae import DiffusersVae
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.demo.media import EXAMPLES, HELD_OUT, KNOWN, NEW, PLACES, VALIDATED, DemoImage, render
from ditkit_flux2.demo.write import WEIGHTS
from ditkit_flux2.encoders import VAE


def test_the_files_take_less_than_3_mb():
    sizes = {file.name: file.stat().st_size for file in WEIGHTS.iterdir()}
    assert set(sizes) == {"vae.safetensors", "transformer.safetensors"} and sum(sizes.values()) < 3_000_000


def test_the_vae_reproduces_other_images_at_30_db(checkpoint):
    encoder = DiffusersVae(VAE, ModelPaths(base=str(checkpoint)), torch.device("cpu"))
    encoder.load()
    shown = {example.image for example in EXAMPLES}
    random, wrong = np.random.default_rng(5), []
    for place, look in zip(PLACES, product(COLOURS, SHAPES), strict=False):
        shift = tuple(random.uniform(-0.04, 0.04, 2))
        image = DemoImage(colour=look[0], shape=look[1], place=place, shift=shift)
        assert image not in shown
        pixels = torch.from_numpy(render(image)).permute(2, 0, 1)[:, None].float() / 255
        made = encoder.decode(encoder.encode([pixels * 2 - 1])[0]["latents"])
        wrong.append(float((made - pixels).square().mean()))
    assert len(wrong) == len(PLACES) and -10 * np.log10(np.mean(wrong)) >= 30


def test_the_new_place_is_shown_without_what_is_held_out_and_as_often_as_the_known_ones():
    described = [each.image for each in EXAMPLES if not each.references and each.image not in VALIDATED.values()]
    new = {(image.colour, image.shape) for image in described if image.place == NEW}
    assert new == set(product(COLOURS, SHAPES)) - set(HELD_OUT)
    assert sum(image.place == NEW for image in described) == sum(image.place in KNOWN for image in described) == 12


def test_words_of_captions_are_orthogonal_and_the_layers_leave_them_alone(checkpoint):
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer", local_files_only=True)
    model = Qwen3ForCausalLM.from_pretrained(checkpoint / "text_encoder", local_files_only=True).eval()
    ids = tokenizer("a red triangle on both sides", return_tensors="pt").input_ids
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], states[9]) and torch.equal(states[0], states[27])
    words = states[0][0, 1:]
    torch.testing.assert_close(words @ words.T, words.shape[1] * torch.eye(len(words)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("part", ["vae", "transformer"])
def test_the_checkpoint_has_the_trained_weights(checkpoint, part):
    from safetensors.torch import load_file

    stored = load_file(WEIGHTS / f"{part}.safetensors")
    written = load_file(checkpoint / part / "diffusion_pytorch_model.safetensors")
    assert stored.keys() == written.keys() and all(torch.equal(written[name], each) for name, each in stored.items())
