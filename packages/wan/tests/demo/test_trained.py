"""The weights that the demo ships: small, and a VAE that reproduces clips that it has not seen."""

import numpy as np
import torch

from ditkit_core.families.demo import unigram_tokenizer
from ditkit_core.families.demo_motions import CAPTIONS, DIRECTIONS, SIDE, moving
from ditkit_wan.demo.trained import BASE, load_part, load_text_encoder


def test_the_files_take_less_than_3_mb() -> None:
    files = {file.name: file.stat().st_size for file in BASE.iterdir()}
    assert set(files) == {f"{part}.safetensors" for part in ("vae", "transformer", "text_encoder")}
    assert sum(files.values()) < 3_000_000


def test_the_vae_reproduces_other_clips_at_30_db() -> None:
    vae = load_part("vae")
    looks = zip(
        ("red", "green", "blue", "yellow") * 2,
        ("circle", "square", "triangle") * 3,
        list(DIRECTIONS) * 2,
    )
    decibels = []
    for number, look in enumerate(looks):
        painted = np.round(moving(*look, 1.5 * number - 5.3).paint(SIDE, SIDE, range(5)))
        clip = torch.from_numpy(painted).float().movedim(-1, 0)[None] / 127.5 - 1
        with torch.no_grad():
            made = vae.decode(vae.encode(clip).latent_dist.mode()).sample.clamp(-1, 1)
        decibels.append(-10 * float(((made - clip) / 2).square().mean().log10()))
    assert len(decibels) == 8 and np.mean(decibels) >= 30


def test_words_hardly_resemble_each_other_and_the_vocabulary_is_that_of_the_weights() -> None:
    tokenizer, encoder = unigram_tokenizer(CAPTIONS), load_text_encoder()
    assert encoder.config.vocab_size == len(tokenizer)
    ids = tokenizer(CAPTIONS[-1]).input_ids
    with torch.no_grad():
        features = encoder(torch.tensor([ids])).last_hidden_state[0]
    cosines = (
        torch.nn.functional.normalize(features[1:], dim=1)
        @ torch.nn.functional.normalize(features[1:], dim=1).T
    )
    assert (cosines - torch.eye(len(cosines))).abs().max() < 0.5
