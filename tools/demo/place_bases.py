"""What the programs share that train the tiny base of a demo that teaches a place: images,
optimization, files, and how good a VAE is."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ditkit_core.families.demo_places import KNOWN, LOOKS, PLACES, DemoImage, render
from ditkit_core.families.vae import VaeFamily, patchify
from ditkit_core.training.flow_matching import shift_sigma
from place_judge import Look, judge, row

SIZES = ((64, 64), (48, 80), (80, 48))
"""(height, width) of training images."""
SHARES = (0.6, 0.2, 0.2)
MUON_LR, ADAMW_LR = 4e-3, 2e-3
SEED = 0


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


@torch.no_grad()
def encode_images(vae: Any, patch: int) -> list[Tensor]:
    """The VAE's latents of every look at every known place, not normalised: for each of `SIZES`,
    [looks, places, number, channels, height, width] after patches of a side; the same number has
    the same shift in all looks."""
    random, found = np.random.default_rng(SEED), []
    for height, width in SIZES:
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
            latents = torch.cat(
                [vae.encode(part).latent_dist.mode() for part in pixels_of(images).split(16)]
            )
            places.append(
                torch.stack([patchify(each[:, None], patch)[:, 0] for each in latents]).unflatten(
                    0, (len(LOOKS), -1)
                )
            )
        found.append(torch.stack(places, 1))
    return found


@torch.no_grad()
def measure_vae(family: VaeFamily, vae: Any) -> str:
    """Decibels on held-out images of the demo's kind, whole images, at each size."""
    random, cells = np.random.default_rng(SEED + 1), []
    for height, width in SIZES:
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
    family: VaeFamily, vae: Any, latents: Sequence[Float[Tensor, "channels height width"]]
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
