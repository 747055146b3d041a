"""Trains the tiny FLUX.2 of `flux2-train --demo` from generated shapes: `uv run tools/demo/train_demo_base_flux2.py --work FOLDER`.

First the VAE, then the transformer: about a quarter of an hour of one core together. What a stage made is kept in the working folder
and not made again. At the end, both are measured and written into the package in bf16. The seed is fixed, but training gives other
weights on another processor; that is why the weights are stored and not made by the demo.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ditkit_core.data.media.synthetic import COLOURS, SHAPES
from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.families.vae import patchify
from ditkit_core.models.paths import ModelPaths
from ditkit_core.training.flow_matching import shift_sigma
from ditkit_flux2.demo import write as demo
from ditkit_flux2.demo.media import KNOWN, PLACES, DemoImage, paint_shapes, render
from ditkit_flux2.encoders import TEXT, VAE
from ditkit_flux2.model.rope import token_positions
from ditkit_flux2.schedule import sigmas
from measure_demo_flux2 import HEADINGS, Look, judge, row

LOOKS = tuple(product(COLOURS, SHAPES))
SIZES = ((64, 64), (48, 80), (80, 48))
"""(height, width) of training images."""
SHARES = (0.6, 0.2, 0.2)
VAE_STEPS, VAE_BATCH, VAE_LR = 900, 8, 3e-3
STEPS, BATCH, MUON_LR, ADAMW_LR = 800, 64, 4e-3, 2e-3
ROWS = 35
"""Rows of text, at most, that are no padding."""
PADDING_ROWS = 13
"""Rows that stand for the padding in training. They are all alike, apart from their positions, which are spread and sampled anew each
step; a bias on their keys makes up for their number. So a step takes a tenth of the time that it takes with all 512 rows."""
_SEED = 0


class Average:
    """A running average of a module's weights."""

    def __init__(self, model: nn.Module):
        self._model, self._steps = model, 0
        self.state = {name: value.clone() for name, value in model.state_dict().items()}

    def update(self) -> None:
        decay = min(0.995, self._steps / (self._steps + 10))
        self._steps += 1
        for name, value in self._model.state_dict().items():
            if value.is_floating_point():
                self.state[name].lerp_(value, 1 - decay)


def optimise(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], losses: Iterator[Tensor], steps: int, name: str
) -> dict[str, Tensor]:
    """Train with a warm-up and half a cosine; returns the average of the weights, which gives less noise than the last ones."""
    average, began = Average(model), time.monotonic()
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    for step, loss in zip(range(steps), losses, strict=False):
        factor = min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group, rate in zip((g for each in optimizers for g in each.param_groups), rates, strict=True):
            group["lr"] = rate * factor
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        average.update()
        if (step + 1) % 50 == 0:
            minutes = (time.monotonic() - began) / 60
            print(f"{name} {step + 1}/{steps}  loss {loss.item():.4f}  {minutes:.1f} min", flush=True)
    return average.state


def pixels_of(images: Sequence[np.ndarray]) -> Float[Tensor, "batch 3 height width"]:
    """Images of one size in [-1, 1]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def any_shapes(random: np.random.Generator, count: int) -> Float[Tensor, "batch 3 height width"]:
    """Images of one or two shapes of one colour anywhere: the VAE must be able to show what the transformer has yet to learn."""
    height, width = SIZES[random.choice(len(SIZES), p=SHARES)]
    images = []
    for _ in range(count):
        centres = [tuple(random.uniform(0.15, 0.85, 2)) for _ in range(random.choice((1, 1, 2)))]
        colour, shape = LOOKS[random.integers(len(LOOKS))]
        images.append(paint_shapes(shape, colour, centres, height, width))
    return pixels_of(images)


def train_vae(steps: int) -> dict[str, Tensor]:
    """The VAE's weights; in the last quarter only the decoder is trained, on latents with less noise."""
    torch.manual_seed(_SEED)
    random = np.random.default_rng(_SEED)
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

    return optimise(vae, [torch.optim.Adam(vae.parameters(), lr=VAE_LR, betas=(0.9, 0.99))], losses(), steps, "vae")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What the transformer is trained on, encoded."""

    latents: Sequence[Float[Tensor, "looks places number channels height width"]]
    """For each of `SIZES`, normalised; the same number has the same shift in all looks."""
    text: Mapping[str, Float[Tensor, "rows width"]]
    padding: Float[Tensor, " width"]


def describe(look: tuple[str, str], place: str) -> DemoImage:
    return DemoImage(colour=look[0], shape=look[1], place=place)


def edits(look: tuple[str, str]) -> list[tuple[int, str]]:
    """(index of the image before, instruction) of each edit that ends in this look."""
    found = []
    for index, (colour, shape) in enumerate(LOOKS):
        part = {(False, True): "colour", (True, False): "shape"}.get((colour == look[0], shape == look[1]))
        if part is not None:
            _, instruction = describe((colour, shape), KNOWN[0]).edited(part, look[part == "shape"])
            found.append((index, instruction))
    return found


@torch.no_grad()
def encode_images(vae: Any) -> list[Tensor]:
    """Patches of the VAE's latents of every look at every known place, not normalised."""
    random, found = np.random.default_rng(_SEED), []
    for height, width in SIZES:
        places = []
        for place in KNOWN:
            shifts = random.uniform(-0.035, 0.035, (24 if height == width else 8, 2))
            images = [
                render(
                    DemoImage(colour=colour, shape=shape, place=place, height=height, width=width, shift=tuple(shift))
                )
                for colour, shape in LOOKS
                for shift in shifts
            ]
            latents = torch.cat([vae.encode(part).latent_dist.mode() for part in pixels_of(images).split(16)])
            places.append(
                torch.stack([patchify(each[:, None], 2)[:, 0] for each in latents]).unflatten(0, (len(LOOKS), -1))
            )
        found.append(torch.stack(places, 1))
    return found


def make_corpus(vae: Any, work: Path) -> Corpus:
    """Encode all images and captions; the VAE gets its statistics."""
    patches = encode_images(vae)
    values = torch.cat([each.movedim(3, 0).flatten(1) for each in patches], 1)
    vae.bn.running_mean.copy_(values.mean(1))
    vae.bn.running_var.copy_(values.var(1))
    mean, deviation = (each[:, None, None] for each in (values.mean(1), (values.var(1) + vae.bn.eps).sqrt()))
    demo.write_text(work / "text")
    encoder = LanguageModelEncoder(TEXT, ModelPaths(base=str(work / "text")), torch.device("cpu"), torch.float32)
    encoder.load()
    captions = {caption for look, place in product(LOOKS, PLACES) for caption in describe(look, place).captions}
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
    positions = token_positions(TEXT.num_tokens, grid, [grid] * len(references), torch.device("cpu"))
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
    """The transformer's weights: velocities of images from captions, and of edited images from instructions and references."""
    torch.manual_seed(_SEED)
    random = np.random.default_rng(_SEED)
    model = demo.build_transformer().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modulation" in name or name.startswith(("proj_out", "norm_out")):
                weight.mul_(0.1)  # start close to the residual stream
    edges = torch.linspace(ROWS, TEXT.num_tokens, PADDING_ROWS + 1)

    def losses() -> Iterator[Tensor]:
        while True:
            latents = corpus.latents[random.choice(len(SIZES), p=SHARES)]
            looks, places = random.integers(len(LOOKS), size=BATCH), random.integers(len(KNOWN), size=BATCH)
            numbers = random.integers(latents.shape[2], size=BATCH)
            if random.random() < 0.2:
                chosen = [(found := edits(LOOKS[look]))[random.integers(len(found))] for look in looks]
                captions = [instruction for _, instruction in chosen]
                references = [latents[[before for before, _ in chosen], places, numbers]]
            else:
                forms = (random.random(BATCH) < 0.3).astype(int)
                images = [describe(LOOKS[look], KNOWN[place]) for look, place in zip(looks, places, strict=True)]
                captions = [image.captions[form] for image, form in zip(images, forms, strict=True)]
                references = []
            captions = ["" if random.random() < 0.1 else caption for caption in captions]
            sigma = torch.sigmoid(1.2 * torch.from_numpy(random.standard_normal(BATCH)).float())
            sigma = shift_sigma(sigma, 1.6)
            clean, level = latents[looks, places, numbers], sigma[:, None, None, None]
            noise = torch.randn_like(clean)
            spread = torch.from_numpy(random.random(PADDING_ROWS)).float()
            padding_at = (edges[:-1] + spread * edges.diff()).long().clamp(max=TEXT.num_tokens - 1)
            text = torch.stack([corpus.text[caption] for caption in captions]), corpus.padding
            found = velocity(model, clean.lerp(noise, level), sigma, text, references, padding_at)
            yield (found - (noise - clean)).square().mean()

    matrices = {name for name, weight in model.named_parameters() if "transformer_blocks" in name and weight.ndim == 2}
    groups = [[weight for name, weight in model.named_parameters() if (name in matrices) == of] for of in (True, False)]
    optimizers = [
        torch.optim.Muon(groups[0], lr=MUON_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups[1], lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    return optimise(model, optimizers, losses(), steps, "transformer")


@torch.no_grad()
def measure_vae(vae: Any) -> str:
    """Decibels on held-out images of the demo's kind, whole images, at each size."""
    random, cells = np.random.default_rng(_SEED + 1), []
    for height, width in SIZES:
        images = [
            render(DemoImage(colour=colour, shape=shape, place=place, height=height, width=width, shift=tuple(shift)))
            for (colour, shape), place in product(LOOKS, PLACES)
            for shift in random.uniform(-0.035, 0.035, (2, 2))
        ]
        wrong = []
        for pixels in pixels_of(images):
            decoded = VAE.decode_clip(
                vae, VAE.encode_clip(vae, pixels[:, None], torch.device("cpu")), torch.device("cpu")
            )
            wrong.append((decoded[:, 0] - (pixels + 1) / 2).square().mean())
        cells.append(f"{-10 * torch.stack(wrong).mean().log10():.1f} dB at {height} x {width}")
    return f"VAE, {len(images)} held-out images of each size: {', '.join(cells)}"


@torch.no_grad()
def sample(model: nn.Module, corpus: Corpus, captions: Sequence[str], seed: int) -> Float[Tensor, "batch c h w"]:
    """Latents from captions, with all rows of text, 20 Euler steps and guidance 2, as the demo samples."""
    latents = torch.randn(len(captions), 4 * demo.LATENT_CHANNELS, 4, 4, generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([corpus.text[caption] for caption in (*captions, *[""] * len(captions))])
    levels = sigmas(16, 20, 0.0).float()
    for sigma, following in pairwise(levels):
        both = velocity(model, torch.cat([latents] * 2), sigma.expand(len(rows)), (rows, corpus.padding))
        given, without = both.chunk(2)
        latents = latents + (following - sigma) * (without + 2 * (given - without))
    return latents


def measure_transformer(model: nn.Module, vae: Any, corpus: Corpus) -> str:
    """How many samples of every look at every known place are right."""
    wanted = [Look(*look, place) for look, place in product(LOOKS, KNOWN)]
    captions = [describe((look.colour, look.shape), look.place).captions[0] for look in wanted]
    shown = [
        judge(255 * VAE.decode_clip(vae, each[:, None], torch.device("cpu"))[:, 0].permute(1, 2, 0))
        for each in sample(model, corpus, captions, _SEED)
    ]
    return row("base", "known", "-", wanted, shown)


def kept(file: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors in a file, which is made if it does not exist."""
    if not file.exists():
        save_file(make(), file)
    return load_file(file)


def in_bf16(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices and kernels in bf16; norms, biases and statistics as they are."""
    return {name: value.bfloat16() if value.ndim > 1 else value for name, value in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where stages keep what they made")
    parser.add_argument(
        "--to", type=Path, default=demo.WEIGHTS, help="where to write the weights (default: the package)"
    )
    parser.add_argument("--steps", type=int, nargs=2, default=(VAE_STEPS, STEPS), help="of the VAE and the transformer")
    options = parser.parse_args()
    for folder in (options.work, options.to):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    vae, model = demo.build_vae().requires_grad_(False), demo.build_transformer().requires_grad_(False)
    vae.load_state_dict(kept(options.work / "vae.safetensors", lambda: train_vae(options.steps[0])))
    corpus = make_corpus(vae, options.work)
    trained = kept(options.work / "transformer.safetensors", lambda: train_transformer(corpus, options.steps[1]))
    model.load_state_dict(trained)
    for name, module in (("vae", vae), ("transformer", model)):
        state, file = in_bf16(module.state_dict()), options.to / f"{name}.safetensors"
        save_file(state, file)
        print(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB")
        module.load_state_dict(state)
    print(measure_vae(vae))
    print(HEADINGS)
    print(measure_transformer(model, vae, corpus))


if __name__ == "__main__":
    main()
