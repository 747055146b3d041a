"""What the programs share that train the tiny base of a demo that teaches a place: images,
optimization, files, and how good a VAE is."""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ditkit_core.families.demo_edits import edited
from ditkit_core.families.demo_places import (
    CAPTIONS,
    KNOWN,
    LOOKS,
    PLACES,
    DemoImage,
    paint_shapes,
    render,
)
from ditkit_core.families.euler import shifted_levels
from ditkit_core.families.language_models import TextEncoding
from ditkit_core.families.text import LanguageModelEncoder
from ditkit_core.families.vae import VaeFamily, patchify
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import ModelSpec
from ditkit_core.training.flow_matching import shift_sigma
from place_judge import HEADINGS, Look, judge, row

Size = tuple[int, int]
"""Height and width."""
SIZES: Sequence[Size] = ((64, 64), (48, 80), (80, 48))
"""Of training images. A family whose sides are multiples of 32 has the first one alone."""
SHARES = (0.6, 0.2, 0.2)
MUON_LR, ADAMW_LR = 4e-3, 2e-3
SEED = 0
VAE_BATCH, VAE_LR = 8, 3e-3


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
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    losses: Iterator[Tensor],
    steps: int,
    name: str,
) -> dict[str, Tensor]:
    """Train with a warm-up and half a cosine; returns the average of the weights, which gives less
    noise than the last ones."""
    average, began = Average(model), time.monotonic()
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    for step, loss in zip(range(steps), losses, strict=False):
        factor = min((step + 1) / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group, rate in zip(
            (g for each in optimizers for g in each.param_groups), rates, strict=True
        ):
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
            print(
                f"{name} {step + 1}/{steps}  loss {loss.item():.4f}  {minutes:.1f} min", flush=True
            )
    return average.state


def pixels_of(images: Sequence[np.ndarray]) -> Float[Tensor, "batch 3 height width"]:
    """Images of one size in [-1, 1]."""
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def describe(look: tuple[str, str], place: str) -> DemoImage:
    return DemoImage(colour=look[0], shape=look[1], position=place)


def drawn_size(random: np.random.Generator, count: int) -> int:
    """The number of one of so many sizes."""
    return int(random.choice(count, p=SHARES)) if count > 1 else 0


def any_shapes(
    random: np.random.Generator, count: int, sizes: Sequence[Size]
) -> Float[Tensor, "batch 3 height width"]:
    """Images of one or two shapes of one colour anywhere: the VAE must be able to show what the
    transformer has yet to learn."""
    height, width = sizes[drawn_size(random, len(sizes))]
    images = []
    for _ in range(count):
        centres = [tuple(random.uniform(0.15, 0.85, 2)) for _ in range(random.choice((1, 1, 2)))]
        colour, shape = LOOKS[random.integers(len(LOOKS))]
        images.append(paint_shapes(shape, colour, centres, height, width))
    return pixels_of(images)


def train_vae(
    family: VaeFamily, vae: Any, steps: int, sizes: Sequence[Size] = SIZES
) -> dict[str, Tensor]:
    """The VAE's weights; in the last quarter only the decoder is trained, on latents with less
    noise."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    vae.train()

    def losses() -> Iterator[Tensor]:
        for step in range(steps):
            frozen = step >= 0.75 * steps
            vae.encoder.requires_grad_(not frozen), vae.quant_conv.requires_grad_(not frozen)
            pixels = _batched(family, any_shapes(random, VAE_BATCH, sizes))
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


def _batched(family: VaeFamily, pixels: Float[Tensor, "batch 3 height width"]) -> Tensor:
    """Images as the class takes them: as clips of one frame, if it takes clips, and opaque."""
    if family.has_opacity:
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], 1)
    return pixels[:, :, None] if family.is_video else pixels


def normalise(state: dict[str, Tensor], mean: Tensor, deviation: Tensor) -> None:
    """Give the latents of a VAE mean 0 and variance 1, by its first and last convolution of latents
    (`quant_conv`, `post_quant_conv`): mean and deviation of each channel before are given."""
    count, one = len(mean), (1,) * (state["quant_conv.weight"].ndim - 2)
    # of means, then of logarithms of variances
    weight, bias = state["quant_conv.weight"], state["quant_conv.bias"]
    weight[:count] /= deviation.view(-1, 1, *one)
    bias[:count] = (bias[:count] - mean) / deviation
    bias[count:] -= 2 * deviation.log()
    post = state["post_quant_conv.weight"]
    state["post_quant_conv.bias"] += post.flatten(1) @ mean
    post *= deviation.view(-1, *one)


def with_unit_latents(
    family: VaeFamily, vae: Any, state: dict[str, Tensor], sizes: Sequence[Size] = SIZES
) -> dict[str, Tensor]:
    """Trained weights of a VAE of clips, in bf16, whose latents of images have mean 0 and variance
    1. An image is the first and only frame, which the earlier times of a kernel do not reach: they
    are 0."""
    for value in state.values():
        if value.ndim == 5:
            value[:, :, :-1] = 0
    vae.load_state_dict(state)
    channels = torch.cat([x.movedim(3, 0).flatten(1) for x in encode_images(family, vae, sizes)], 1)
    normalise(state, channels.mean(1), channels.std(1))
    return in_bf16(state)


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


def encode_captions(
    encoding: TextEncoding, checkpoint: Path, captions: Sequence[str]
) -> dict[str, Float[Tensor, "rows width"]]:
    """Features of captions, and of the empty one, by the text encoder of a checkpoint."""
    paths = ModelPaths(base=str(checkpoint))
    encoder = LanguageModelEncoder(encoding, paths, torch.device("cpu"), torch.float32)
    encoder.load()
    return {caption: encoder.encode([caption])[0]["text"] for caption in ("", *captions)}


@torch.no_grad()
def encode_images(family: VaeFamily, vae: Any, sizes: Sequence[Size] = SIZES) -> list[Tensor]:
    """The VAE's latents of every look at every known place, not normalised: for each size,
    [looks, places, number, channels, height, width] after patches of a side; the same number has
    the same shift in all looks."""
    random, found = np.random.default_rng(SEED), []
    for height, width in sizes:
        places = []
        for place in KNOWN:
            shifts = random.uniform(-0.035, 0.035, (24 if height == width else 8, 2))
            images = [
                render(
                    DemoImage(
                        colour=colour,
                        shape=shape,
                        position=place,
                        height=height,
                        width=width,
                        shift=tuple(shift),
                    )
                )
                for colour, shape in LOOKS
                for shift in shifts
            ]
            batches = [_batched(family, part) for part in pixels_of(images).split(16)]
            latents = torch.cat([vae.encode(batch).latent_dist.mode() for batch in batches])
            frames = latents.view(len(latents), latents.shape[1], 1, *latents.shape[-2:])
            patches = torch.stack([patchify(frame, family.patch)[:, 0] for frame in frames])
            places.append(patches.unflatten(0, (len(LOOKS), -1)))
        found.append(torch.stack(places, 1))
    return found


@torch.no_grad()
def measure_vae(family: VaeFamily, vae: Any, sizes: Sequence[Size]) -> str:
    """Decibels on held-out images of the demo's kind, whole images, at each size."""
    random, cells = np.random.default_rng(SEED + 1), []
    for height, width in sizes:
        images = [
            render(
                DemoImage(
                    colour=colour,
                    shape=shape,
                    position=place,
                    height=height,
                    width=width,
                    shift=tuple(shift),
                )
            )
            for (colour, shape), place in product(LOOKS, PLACES)
            for shift in random.uniform(-0.035, 0.035, (2, 2))
        ]
        wrong = []
        for pixels in pixels_of(images):
            latents = family.encode_clip(vae, pixels[:, None], torch.device("cpu"))
            decoded = family.decode_clip(vae, latents, torch.device("cpu"))
            wrong.append((decoded[:, 0] - (pixels + 1) / 2).square().mean())
        cells.append(f"{-10 * torch.stack(wrong).mean().log10():.1f} dB at {height} x {width}")
    return f"VAE, {len(images)} held-out images of each size: {', '.join(cells)}"


def known_looks() -> list[Look]:
    """Every colour and shape at every known place."""
    return [Look(*look, place) for look, place in product(LOOKS, KNOWN)]


def measure_samples(
    family: VaeFamily, vae: Any, latents: Float[Tensor, "batch channels height width"]
) -> str:
    """How many samples of `known_looks` are right: a row of the table, from their latents."""
    device = torch.device("cpu")
    shown = [
        judge(255 * family.decode_clip(vae, each[:, None], device)[:, 0].permute(1, 2, 0))
        for each in latents
    ]
    return row("base", "known", "-", known_looks(), shown)


def drawn_captions(
    random: np.random.Generator, looks: Sequence[int], places: Sequence[int]
) -> list[str]:
    """A caption for each pair of indices of `LOOKS` and `KNOWN`: the second form for three of
    ten."""
    forms = (random.random(len(looks)) < 0.3).astype(int)
    images = [
        describe(LOOKS[look], KNOWN[place]) for look, place in zip(looks, places, strict=True)
    ]
    return [image.captions[form] for image, form in zip(images, forms, strict=True)]


def drawn_levels(random: np.random.Generator, count: int) -> Float[Tensor, " count"]:
    """Noise levels of a batch."""
    sigma = torch.sigmoid(1.2 * torch.from_numpy(random.standard_normal(count)).float())
    return shift_sigma(sigma, 1.6)


def train_transformer(
    model: nn.Module,
    velocity: Callable[[Tensor, Tensor, Sequence[str], Tensor | None], Tensor],
    images: Sequence[Tensor],
    steps: int,
    *,
    blocks: Sequence[str],
    small: Sequence[str],
    batch: int = 64,
    edited: float = 0.0,
) -> dict[str, Tensor]:
    """The transformer's weights: velocities of images from captions, and of edited images from
    instructions and references.

    Args:
        model: Untrained.
        velocity: From noised latents, noise levels, captions, and references or None.
        images: Latents, as of `encode_images`, normalised.
        steps: Of the optimizer.
        blocks: As of `optimizers_of`.
        small: Parts of the names of weights that start at a tenth, so that blocks and outputs start
            close to the residual stream.
        batch: Images of a step.
        edited: Share of steps that edit.
    """
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    model.train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in small):
                weight.mul_(0.1)

    def losses() -> Iterator[Tensor]:
        while True:
            latents, references = images[drawn_size(random, len(images))], None
            looks, places = (
                random.integers(len(names), size=batch).tolist() for names in (LOOKS, KNOWN)
            )
            numbers = random.integers(latents.shape[2], size=batch)
            if edited and random.random() < edited:
                choices = [edits(LOOKS[look]) for look in looks]
                pairs = [choice[random.integers(len(choice))] for choice in choices]
                captions = [instruction for _, instruction in pairs]
                references = latents[[before for before, _ in pairs], places, numbers]
            else:
                captions = drawn_captions(random, looks, places)
            captions = ["" if random.random() < 0.1 else caption for caption in captions]
            sigma, clean = drawn_levels(random, batch), latents[looks, places, numbers]
            noise = torch.randn_like(clean)
            noised = clean.lerp(noise, sigma[:, None, None, None])
            wrong = velocity(noised, sigma, captions, references) - (noise - clean)
            yield wrong.square().mean()

    return optimise(model, optimizers_of(model, blocks), losses(), steps, "transformer")


def optimizers_of(model: nn.Module, blocks: Sequence[str]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks, which these parts of names tell, and AdamW for the rest."""
    parameters = dict(model.named_parameters())
    matrices = {
        name
        for name in parameters
        if parameters[name].ndim == 2 and any(part in name for part in blocks)
    }
    groups = [
        [weight for name, weight in parameters.items() if (name in matrices) == of]
        for of in (True, False)
    ]
    return [
        torch.optim.Muon(groups[0], lr=MUON_LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups[1], lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


@torch.no_grad()
def sample(
    velocity: Callable[[Tensor, Tensor, Sequence[str]], Tensor],
    captions: Sequence[str],
    shape: Sequence[int],
    levels: Float[Tensor, " levels"],
    guidance: float,
) -> Float[Tensor, "batch channels height width"]:
    """Latents of a shape from captions, by Euler steps along noise levels.

    Args:
        velocity: From noised latents, a noise level for each, and a caption for each.
        captions: One for each sample.
        shape: Channels, height and width.
        levels: From 1 to 0.
        guidance: 1 is none.
    """
    random, prompts = torch.Generator().manual_seed(SEED), [*captions, *[""] * len(captions)]
    latents = torch.randn(len(captions), *shape, generator=random)
    for sigma, following in pairwise(levels):
        both = velocity(torch.cat([latents] * 2), sigma.expand(len(prompts)), prompts)
        conditional, unconditional = both.chunk(2)
        step = unconditional + guidance * (conditional - unconditional)
        latents = latents + (following - sigma) * step
    return latents


def base_parser(about: str, to: Path, steps: Mapping[str, int]) -> argparse.ArgumentParser:
    """The parser of such a program.

    Args:
        about: What `--help` says.
        to: The package's folder of weights.
        steps: Of each stage, by its name.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="where stages keep what they made")
    parser.add_argument(
        "--to", type=Path, default=to, help="where to write the weights (default: the package)"
    )
    parser.add_argument(
        "--steps", type=int, nargs=len(steps), default=list(steps.values()),
        help=f"of {' and '.join(steps)}",
    )  # fmt: skip
    return parser


def started(options: argparse.Namespace) -> argparse.Namespace:
    """The options, whose folders exist now; the program runs on one thread."""
    for folder in (options.work, options.to):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    return options


def train_base(
    options: argparse.Namespace,
    spec: ModelSpec,
    encoding: TextEncoding,
    demo: Any,
    vae: tuple[VaeFamily, Any],
    images: Sequence[Tensor],
    velocity: Callable[..., Tensor],
    *,
    blocks: Sequence[str],
    small: Sequence[str],
    batch: int = 64,
    captions: Sequence[str] = CAPTIONS,
    edited: float = 0.0,
    sizes: Sequence[Size] = SIZES,
) -> None:
    """Train a transformer on the latents of a trained VAE, and `finish`.

    Args:
        options: Of `base_parser`; the last of `steps` is the transformer's.
        spec: The family.
        encoding: Its text encoder.
        demo: Its module of the demo's checkpoint.
        vae: The family's, and the trained one.
        images: Latents, as of `encode_images`, normalised.
        velocity: From model, noised latents, noise levels, features [rows, width] of each caption,
            and references, if there are any.
        blocks: As of `train_transformer`, likewise `small`, `batch` and `edited`.
        captions: All that `edited` and sampling need.
        sizes: Of the images.
    """
    demo.write_text(options.work / "text")
    text = encode_captions(encoding, options.work / "text", captions)
    model = demo.build_transformer()

    def predicted(
        noised: Tensor, sigma: Tensor, captions: Sequence[str], references: Tensor | None = None
    ) -> Tensor:
        others = () if references is None else (references,)
        return velocity(model, noised, sigma, [text[caption] for caption in captions], *others)

    def train() -> dict[str, Tensor]:
        return train_transformer(
            model, predicted, images, options.steps[-1],
            blocks=blocks, small=small, batch=batch, edited=edited,
        )  # fmt: skip

    model.load_state_dict(kept(options.work / "transformer.safetensors", train))
    levels = shifted_levels(20, spec.training.shift(images[0][0, 0, 0][:, None])).float()
    finish(
        vae[0], {"vae": vae[1], "transformer": model}, options.to,
        lambda captions: sample(predicted, captions, images[0].shape[3:], levels, 2.0), sizes,
    )  # fmt: skip


def finish(
    family: VaeFamily,
    parts: Mapping[str, nn.Module],
    folder: Path,
    latents_of: Callable[[Sequence[str]], Tensor],
    sizes: Sequence[Size] = SIZES,
) -> None:
    """Package VAE and transformer (`parts`), and print what they can do: `latents_of` samples
    captions."""
    package(parts, folder)
    print(measure_vae(family, parts["vae"], sizes))
    latents = latents_of([look.caption for look in known_looks()])
    print(f"{HEADINGS}\n{measure_samples(family, parts['vae'], latents)}")


def package(parts: Mapping[str, nn.Module], folder: Path) -> None:
    """Write the weights of modules in bf16, and load them into the modules."""
    for name, module in parts.items():
        state, file = in_bf16(module.state_dict()), folder / f"{name}.safetensors"
        save_file(state, file)
        print(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB")
        module.load_state_dict(state)


def kept(file: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors in a file, which is made if it does not exist."""
    if not file.exists():
        save_file(make(), file)
    return load_file(file)


def in_bf16(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices and kernels in bf16; norms, biases and statistics as they are."""
    return {name: value.bfloat16() if value.ndim > 1 else value for name, value in state.items()}
