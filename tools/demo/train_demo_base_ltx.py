"""Trains the tiny LTX-Video of `ltx-train --demo` from generated clips: `uv run
tools/demo/train_demo_base_ltx.py --work FOLDER`.

First the VAE, then the transformer. What a stage made is kept in the working folder and not made
again. At the end both are measured and written into the package in bf16. The seed is fixed, but
training gives other weights on another processor; that is why the weights are stored and not made
by the demo.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.data.media.synthetic import COLOURS, SHAPES
from ditkit_core.families.demo_motions import (
    CAPTIONS,
    DIRECTIONS,
    FPS,
    FRAMES,
    NEW,
    SIDE,
    motion_caption,
)
from ditkit_core.models.paths import ModelPaths
from ditkit_core.nn.padding import padding_mask
from ditkit_ltx.demo import write as demo
from ditkit_ltx.encoders import VAE, seconds_of
from ditkit_ltx.spec import LTX, terminal_levels
from measure_demo_motions import Look, judge, rates
from motion_bases import Log, Optimizer, corners, held_out_clips, latents_of_base, schedule
from place_bases import (
    SEED,
    base_parser,
    drawn_levels,
    in_bf16,
    kept,
    optimise,
    optimizers_of,
    package,
    started,
)

STEPS = {"the VAE": 1500, "the transformer": 900}
CLIPS_EACH, BATCH = 20, 64
_CPU = torch.device("cpu")


def decoded(vae: Any, latents: Tensor) -> Tensor:
    """Pixels, at the noise level that samples are decoded at."""
    level = latents.new_full(latents.shape[:1], VAE.decode_timestep or 0)
    return vae.decode(latents, temb=level).sample


def train_vae(vae: Any, steps: int) -> dict[str, Tensor]:
    """The VAE's weights, with the statistics of its latents."""
    vae.train()
    random, noise = np.random.default_rng(SEED), torch.Generator().manual_seed(SEED)
    parameters = list(vae.parameters())
    matrices = [x for x in parameters if x.ndim == 5]
    others = [x for x in parameters if x.ndim != 5]
    optimizer, log = Optimizer(matrices, others, (5e-3, 2e-3)), Log("vae", steps)
    for step in range(steps):
        clips = corners(random, 4, SIDE)
        latents = vae.encode(clips).latent_dist.mode()
        noised = latents + 0.1 * torch.randn(latents.shape, generator=noise)
        wrong = decoded(vae, noised) - clips
        loss = 4 * wrong.square().mean() + 0.3 * wrong.abs().mean() + 1e-3 * latents.square().mean()
        loss.backward()
        optimizer.step(schedule(step, steps))
        log.add(step, loss, lambda: measure_vae(vae))
    vae.load_state_dict(in_bf16(vae.state_dict()))
    channels = latents_of_base(vae, 4)[0].transpose(0, 1).flatten(1)
    vae.latents_mean.copy_(channels.mean(1)), vae.latents_std.copy_(channels.std(1))
    return dict(vae.state_dict())


@torch.no_grad()
def measure_vae(vae: Any) -> str:
    """Decibels between held-out clips and what is decoded of their latents."""
    wrong = [
        (decoded(vae, vae.encode(clip[None]).latent_dist.mode())[0] - clip).square().mean() / 4
        for clip in held_out_clips()
    ]
    return f"{float((-10 * torch.stack(wrong).log10()).mean()):.1f} dB of held-out clips"


def velocity(model: nn.Module, noised: Tensor, sigma: Tensor, text: Sequence[Tensor]) -> Tensor:
    """The model's velocity.

    Args:
        noised: Noised latents [batch, channels, frames, height, width].
        sigma: Noise levels [batch].
        text: Features of each caption [rows, width].
    """
    frames, *sides = noised.shape[2:]
    rows = pad_sequence(list(text), batch_first=True)
    mask = padding_mask([len(x) for x in text], noised.device)
    axes = [seconds_of(FRAMES, FPS, False)]
    axes += [VAE.latent_size({})[2] * torch.arange(side).double() for side in sides]
    assert len(axes[0]) == frames
    result = model(
        rearrange(noised, "b c f h w -> b (f h w) c"),
        rows,
        1000 * sigma[:, None],
        torch.ones_like(rows[..., 0]) if mask is None else mask.float(),
        video_coords=torch.cartesian_prod(*axes).T[None].expand(len(noised), -1, -1),
    ).sample
    return rearrange(result, "b (f h w) c -> b c f h w", f=frames, h=sides[0])


def train_transformer(
    model: nn.Module, latents: Tensor, captions: Sequence[str], text: dict[str, Tensor], steps: int
) -> dict[str, Tensor]:
    """The transformer's weights: velocities of clips from captions."""
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    model.train()
    with torch.no_grad():
        model.get_parameter("proj_out.weight").mul_(0.1)

    def losses() -> Iterator[Tensor]:
        while True:
            chosen = random.integers(len(latents), size=BATCH)
            named = ["" if random.random() < 0.1 else captions[number] for number in chosen]
            sigma, clean = drawn_levels(random, BATCH), latents[chosen]
            noise = torch.randn_like(clean)
            noised = clean.lerp(noise, sigma[:, None, None, None, None])
            wrong = velocity(model, noised, sigma, [text[name] for name in named])
            yield (wrong - (noise - clean)).square().mean()

    optimizers = optimizers_of(model, ("transformer_blocks.",))
    return optimise(model, optimizers, losses(), steps, "transformer")


@torch.no_grad()
def measure_samples(model: nn.Module, vae: Any, text: dict[str, Tensor], shape: Any) -> str:
    """How many samples of every known caption are right."""
    looks = [Look(c, s, way) for way in DIRECTIONS if way != NEW for c in COLOURS for s in SHAPES]
    prompts = [text[motion_caption(*look)] for look in looks] + [text[""]] * len(looks)
    latents = torch.randn(len(looks), *shape, generator=torch.Generator().manual_seed(SEED))
    for sigma, following in pairwise(terminal_levels(latents[0, 0].numel(), 20, 0.0).float()):
        both = velocity(model, torch.cat([latents] * 2), sigma.expand(len(prompts)), prompts)
        conditional, unconditional = both.chunk(2)
        step = unconditional + 3 * (conditional - unconditional)
        latents = latents + (following - sigma) * step
    shown = []
    for clip in latents:
        noise = torch.randn(clip.shape, generator=torch.Generator().manual_seed(SEED))
        pixels = VAE.decode_clip(vae, torch.cat([clip, noise]), _CPU)
        shown.append(judge((255 * pixels).permute(1, 2, 3, 0).round().numpy()))
    cells = ", ".join(f"{name} {100 * share:.0f} %" for name, share in rates(looks, shown).items())
    return f"{len(looks)} samples of known motions: right in {cells}"


def main() -> None:
    options = started(base_parser(str(__doc__), demo.WEIGHTS, STEPS).parse_args())
    vae: Any = demo.build_vae()
    state = kept(options.work / "vae.safetensors", lambda: train_vae(vae, options.steps[0]))
    vae.requires_grad_(False).eval().load_state_dict(state)
    demo.write_text(options.work / "text")
    paths = ModelPaths(base=str(options.work / "text"))
    encoder = LTX.auxiliary.text_encoder(paths, _CPU, torch.float32, "never")
    encoder.load()
    text = {caption: encoder.encode([caption])[0]["text"] for caption in ("", *CAPTIONS)}
    latents, captions = latents_of_base(vae, CLIPS_EACH)
    statistics = (vae.latents_mean, vae.latents_std)
    mean, deviation = (value.view(-1, 1, 1, 1) for value in statistics)
    latents = (latents - mean) / deviation
    model = demo.build_transformer()

    def train() -> dict[str, Tensor]:
        return train_transformer(model, latents, captions, text, options.steps[1])

    model.load_state_dict(kept(options.work / "transformer.safetensors", train))
    package({"vae": vae, "transformer": model}, options.to)
    print(measure_vae(vae))
    print(measure_samples(model.eval(), vae, text, latents.shape[1:]))


if __name__ == "__main__":
    main()
