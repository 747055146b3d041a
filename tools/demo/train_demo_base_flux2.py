"""Trains the tiny FLUX.2 of `flux2-train --demo` from generated shapes: `uv run
tools/demo/train_demo_base_flux2.py --work FOLDER`.

First the VAE, then the transformer: about a quarter of an hour of one core together. What a stage
made is kept in the working folder and not made again. At the end, both are measured and written
into the package in bf16. The seed is fixed, but training gives other weights on another processor;
that is why the weights are stored and not made by the demo.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.families.demo_edits import edited
from ditkit_core.families.demo_places import KNOWN, LOOKS, PLACES, paint_shapes
from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.models.paths import ModelPaths
from ditkit_flux2.demo import write as demo
from ditkit_flux2.encoders import TEXT, VAE
from ditkit_flux2.model.rope import token_positions
from ditkit_flux2.schedule import sigmas
from place_bases import (
    SEED,
    SHARES,
    SIZES,
    describe,
    drawn_captions,
    drawn_levels,
    encode_images,
    kept,
    known_looks,
    measure_samples,
    measure_vae,
    optimise,
    optimizers_of,
    package,
    pixels_of,
)
from place_judge import HEADINGS

VAE_STEPS, VAE_BATCH, VAE_LR = 900, 8, 3e-3
STEPS, BATCH = 800, 64
ROWS = 35
"""Rows of text, at most, that are no padding."""
PADDING_ROWS = 13
"""Rows that stand for the padding in training. They are all alike, apart from their positions,
which are spread and sampled anew each step; a bias on their keys makes up for their number. So a
step takes a tenth of the time that it takes with all 512 rows."""


def any_shapes(random: np.random.Generator, count: int) -> Float[Tensor, "batch 3 height width"]:
    """Images of one or two shapes of one colour anywhere: the VAE must be able to show what the
    transformer has yet to learn."""
    height, width = SIZES[random.choice(len(SIZES), p=SHARES)]
    images = []
    for _ in range(count):
        centres = [tuple(random.uniform(0.15, 0.85, 2)) for _ in range(random.choice((1, 1, 2)))]
        colour, shape = LOOKS[random.integers(len(LOOKS))]
        images.append(paint_shapes(shape, colour, centres, height, width))
    return pixels_of(images)


def train_vae(steps: int) -> dict[str, Tensor]:
    """The VAE's weights; in the last quarter only the decoder is trained, on latents with less
    noise."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    vae = demo.build_vae().train()

    def losses() -> Iterator[Tensor]:
        for step in range(steps):
            frozen = step >= 0.75 * steps
            vae.encoder.requires_grad_(not frozen), vae.quant_conv.requires_grad_(not frozen)
            pixels = any_shapes(random, VAE_BATCH)
            mode = vae.encode(pixels).latent_dist.mode()
            noise = (0.03 if frozen else 0.1) * mode.detach().std() * torch.randn_like(mode)
            wrong = vae.decode(mode + noise).sample - pixels
            yield 4 * wrong.square().mean() + wrong.abs().mean() + 1e-3 * mode.square().mean()

    return optimise(
        vae,
        [torch.optim.Adam(vae.parameters(), lr=VAE_LR, betas=(0.9, 0.99))],
        losses(),
        steps,
        "vae",
    )


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What the transformer is trained on, encoded."""

    latents: Sequence[Float[Tensor, "looks places number channels height width"]]
    """For each of `SIZES`, normalised; the same number has the same shift in all looks."""
    text: Mapping[str, Float[Tensor, "rows width"]]
    padding: Float[Tensor, " width"]


def edits(look: tuple[str, str]) -> list[tuple[int, str]]:
    """(index of the image before, instruction) of each edit that ends in this look."""
    found = []
    for index, (colour, shape) in enumerate(LOOKS):
        part = {(False, True): "colour", (True, False): "shape"}.get(
            (colour == look[0], shape == look[1])
        )
        if part is not None:
            _, instruction = edited(
                describe((colour, shape), KNOWN[0]), part, look[part == "shape"]
            )
            found.append((index, instruction))
    return found


def make_corpus(vae: Any, work: Path) -> Corpus:
    """Encode all images and captions; the VAE gets its statistics."""
    patches = encode_images(vae, VAE.patch)
    values = torch.cat([each.movedim(3, 0).flatten(1) for each in patches], 1)
    vae.bn.running_mean.copy_(values.mean(1))
    vae.bn.running_var.copy_(values.var(1))
    mean, deviation = (
        each[:, None, None] for each in (values.mean(1), (values.var(1) + vae.bn.eps).sqrt())
    )
    demo.write_text(work / "text")
    encoder = LanguageModelEncoder(
        TEXT, ModelPaths(base=str(work / "text")), torch.device("cpu"), torch.float32
    )
    encoder.load()
    captions = {
        caption
        for look, place in product(LOOKS, PLACES)
        for caption in describe(look, place).captions
    }
    captions |= {"", *(instruction for look in LOOKS for _, instruction in edits(look))}
    text = {caption: encoder.encode([caption])[0]["text"] for caption in sorted(captions)}
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


def train_transformer(corpus: Corpus, steps: int) -> dict[str, Tensor]:
    """The transformer's weights: velocities of images from captions, and of edited images from
    instructions and references."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    model = demo.build_transformer().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modulation" in name or name.startswith(("proj_out", "norm_out")):
                weight.mul_(0.1)  # start close to the residual stream
    edges = torch.linspace(ROWS, TEXT.num_tokens, PADDING_ROWS + 1)

    def losses() -> Iterator[Tensor]:
        while True:
            latents = corpus.latents[random.choice(len(SIZES), p=SHARES)]
            looks, places = (
                random.integers(len(LOOKS), size=BATCH),
                random.integers(len(KNOWN), size=BATCH),
            )
            numbers = random.integers(latents.shape[2], size=BATCH)
            if random.random() < 0.2:
                chosen = [
                    (found := edits(LOOKS[look]))[random.integers(len(found))] for look in looks
                ]
                captions = [instruction for _, instruction in chosen]
                references = [latents[[before for before, _ in chosen], places, numbers]]
            else:
                captions, references = drawn_captions(random, looks, places), []
            captions = ["" if random.random() < 0.1 else caption for caption in captions]
            sigma = drawn_levels(random, BATCH)
            clean, level = latents[looks, places, numbers], sigma[:, None, None, None]
            noise = torch.randn_like(clean)
            spread = torch.from_numpy(random.random(PADDING_ROWS)).float()
            padding_at = (edges[:-1] + spread * edges.diff()).long().clamp(max=TEXT.num_tokens - 1)
            text = torch.stack([corpus.text[caption] for caption in captions]), corpus.padding
            found = velocity(model, clean.lerp(noise, level), sigma, text, references, padding_at)
            yield (found - (noise - clean)).square().mean()

    return optimise(
        model, optimizers_of(model, ("transformer_blocks",)), losses(), steps, "transformer"
    )


@torch.no_grad()
def sample(
    model: nn.Module, corpus: Corpus, captions: Sequence[str], seed: int
) -> Float[Tensor, "batch c h w"]:
    """Latents from captions, with all rows of text, 20 Euler steps and guidance 2, as the demo
    samples."""
    latents = torch.randn(
        len(captions), 4 * demo.LATENT_CHANNELS, 4, 4, generator=torch.Generator().manual_seed(seed)
    )
    rows = torch.stack([corpus.text[caption] for caption in (*captions, *[""] * len(captions))])
    levels = sigmas(16, 20, 0.0).float()
    for sigma, following in pairwise(levels):
        both = velocity(
            model, torch.cat([latents] * 2), sigma.expand(len(rows)), (rows, corpus.padding)
        )
        given, without = both.chunk(2)
        latents = latents + (following - sigma) * (without + 2 * (given - without))
    return latents


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="where stages keep what they made")
    parser.add_argument(
        "--to",
        type=Path,
        default=demo.WEIGHTS,
        help="where to write the weights (default: the package)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=(VAE_STEPS, STEPS),
        help="of the VAE and the transformer",
    )
    options = parser.parse_args()
    for folder in (options.work, options.to):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    vae, model = (
        demo.build_vae().requires_grad_(False),
        demo.build_transformer().requires_grad_(False),
    )
    vae.load_state_dict(kept(options.work / "vae.safetensors", lambda: train_vae(options.steps[0])))
    corpus = make_corpus(vae, options.work)
    trained = kept(
        options.work / "transformer.safetensors",
        lambda: train_transformer(corpus, options.steps[1]),
    )
    model.load_state_dict(trained)
    package({"vae": vae, "transformer": model}, options.to)
    print(measure_vae(VAE, vae))
    captions = [look.caption for look in known_looks()]
    print(f"{HEADINGS}\n{measure_samples(VAE, vae, sample(model, corpus, captions, SEED))}")


if __name__ == "__main__":
    main()
