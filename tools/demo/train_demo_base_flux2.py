"""Trains the tiny FLUX.2 of `flux2-train --demo` from generated shapes: `uv run
tools/demo/train_demo_base_flux2.py --work FOLDER`.

First the VAE, then the transformer: about a quarter of an hour of one core together. What a stage
made is kept in the working folder and not made again. At the end, both are measured and written
into the package in bf16. The seed is fixed, but training gives other weights on another processor;
that is why the weights are stored and not made by the demo.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.families.demo_places import LOOKS, PLACES
from ditkit_flux2.demo import write as demo
from ditkit_flux2.encoders import TEXT, VAE
from ditkit_flux2.model.rope import token_positions
from ditkit_flux2.schedule import sigmas
from place_bases import (
    SEED,
    base_parser,
    describe,
    edits,
    encode_captions,
    encode_images,
    finish,
    kept,
    sample,
    started,
    train_transformer,
    train_vae,
)

VAE_STEPS, STEPS = 900, 800
ROWS = 35
"""Rows of text, at most, that are no padding."""
PADDING_ROWS = 13
"""Rows that stand for the padding in training. They are all alike, apart from their positions,
which are spread and sampled anew each step; a bias on their keys makes up for their number. So a
step takes a tenth of the time that it takes with all 512 rows."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What the transformer is trained on, encoded."""

    latents: Sequence[Float[Tensor, "looks places number channels height width"]]
    """For each of `SIZES`, normalised; the same number has the same shift in all looks."""
    text: Mapping[str, Float[Tensor, "rows width"]]
    padding: Float[Tensor, " width"]


def make_corpus(vae: Any, work: Path) -> Corpus:
    """Encode all images and captions; the VAE gets its statistics."""
    patches = encode_images(VAE, vae)
    values = torch.cat([each.movedim(3, 0).flatten(1) for each in patches], 1)
    vae.bn.running_mean.copy_(values.mean(1))
    vae.bn.running_var.copy_(values.var(1))
    mean, deviation = (
        each[:, None, None] for each in (values.mean(1), (values.var(1) + vae.bn.eps).sqrt())
    )
    demo.write_text(work / "text")
    captions = {
        caption
        for look, place in product(LOOKS, PLACES)
        for caption in describe(look, place).captions
    }
    captions |= {instruction for look in LOOKS for _, instruction in edits(look)}
    text = encode_captions(TEXT, work / "text", sorted(captions))
    padding = text[""][-1]
    assert all((rows[ROWS:] == padding).all() for rows in text.values())
    return Corpus(
        latents=[(each - mean) / deviation for each in patches],
        text={caption: rows[:ROWS] for caption, rows in text.items()},
        padding=padding,
    )


def velocity(
    model: nn.Module,
    noised: Float[Tensor, "batch channels height width"],
    sigma: Float[Tensor, " batch"],
    text: tuple[Float[Tensor, "batch rows width"], Tensor],
    references: Sequence[Float[Tensor, "batch channels height width"]] = (),
    padding_at: Tensor | None = None,
) -> Float[Tensor, "batch channels height width"]:
    """The model's velocity.

    Args:
        noised: Noised latents.
        sigma: Noise levels.
        text: Rows of the captions, and the row of the padding.
        references: Latents of the same size.
        padding_at: Positions of the rows that stand for the padding; None takes all rows.
    """
    grid, (rows, padding) = noised.shape[2:], text
    positions = token_positions(
        TEXT.num_tokens, grid, [grid] * len(references), torch.device("cpu")
    )
    rows_at = torch.arange(ROWS)
    padding_at = torch.arange(ROWS, TEXT.num_tokens) if padding_at is None else padding_at
    images = torch.cat([each.flatten(2).transpose(1, 2) for each in (noised, *references)], 1)
    bias = torch.zeros(ROWS + len(padding_at) + images.shape[1])
    bias[ROWS : ROWS + len(padding_at)] = math.log((TEXT.num_tokens - ROWS) / len(padding_at))
    result = model(
        images,
        torch.cat([rows, padding.expand(len(rows), len(padding_at), -1)], 1),
        sigma,
        positions[TEXT.num_tokens :],
        positions[torch.cat([rows_at, padding_at])],
        joint_attention_kwargs={"attention_mask": bias.expand(len(rows), 1, 1, -1)},
    ).sample
    return result[:, : grid[0] * grid[1]].transpose(1, 2).unflatten(2, grid)


def main() -> None:
    options = started(
        base_parser(
            str(__doc__), demo.WEIGHTS, {"the VAE": VAE_STEPS, "the transformer": STEPS}
        ).parse_args()
    )
    vae: Any = demo.build_vae()
    weights = kept(options.work / "vae.safetensors", lambda: train_vae(VAE, vae, options.steps[0]))
    vae.requires_grad_(False).load_state_dict(weights)
    corpus, model = make_corpus(vae, options.work), demo.build_transformer()
    random, edges = (
        np.random.default_rng(SEED + 1), torch.linspace(ROWS, TEXT.num_tokens, PADDING_ROWS + 1)
    )  # fmt: skip

    def predicted(
        noised: Tensor,
        sigma: Tensor,
        captions: Sequence[str],
        references: Tensor | None = None,
        padding_at: Tensor | None = None,
    ) -> Tensor:
        text = torch.stack([corpus.text[caption] for caption in captions]), corpus.padding
        others = [] if references is None else [references]
        return velocity(model, noised, sigma, text, others, padding_at)

    def predicted_in_training(
        noised: Tensor, sigma: Tensor, captions: Sequence[str], references: Tensor | None
    ) -> Tensor:
        spread = torch.from_numpy(random.random(PADDING_ROWS)).float()
        padding_at = (edges[:-1] + spread * edges.diff()).long().clamp(max=TEXT.num_tokens - 1)
        return predicted(noised, sigma, captions, references, padding_at)

    def train() -> dict[str, Tensor]:
        return train_transformer(
            model, predicted_in_training, corpus.latents, options.steps[1],
            blocks=("transformer_blocks",), small=("modulation", "proj_out", "norm_out"),
            edited=0.2,
        )  # fmt: skip

    model.load_state_dict(kept(options.work / "transformer.safetensors", train))
    levels = sigmas(16, 20, 0.0).float()
    finish(
        VAE, {"vae": vae, "transformer": model}, options.to,
        lambda captions: sample(predicted, captions, (4 * demo.LATENT_CHANNELS, 4, 4), levels, 2.0),
    )  # fmt: skip


if __name__ == "__main__":
    main()
