"""Trains the tiny Wan base that `wan-train --demo` ships with, on clips generated from
`ditkit_core.families.demo_motions`.

`uv run tools/demo/train_demo_base_wan.py` takes about half an hour on one CPU core. Three stages:
`vae`; `transformer`, on latents of that VAE; `package`, which writes the weights into the package,
rounded to bf16, and measures the VAE as it is then. The first two leave a file in the work folder;
a stage whose file is there is not done again.

What made it possible in so little time: soft edges and one size of shapes; orthogonalised updates
(Muon) of convolutions and linear layers; captions of 12 tokens instead of 512, with the weight of
the missing padding as a bias of attention.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from ditkit_core.data.media.synthetic import isometry
from ditkit_core.families.demo import unigram_tokenizer
from ditkit_core.families.demo_motions import CAPTIONS
from ditkit_wan.demo import trained
from ditkit_wan.demo.models import TEXT_DIM, build_text_encoder
from motion_bases import Log, Optimizer, corners, held_out_clips, latents_of_base, psnr, schedule

STEPS = {"vae": 2000, "transformer": 4000}
VAE = {
    "base_dim": 16,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "z_dim": 16,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "temperal_downsample": [True, True],
}
TRANSFORMER = {
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "num_layers": 4,
    "ffn_dim": 384,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT_DIM,
    "rope_max_seq_len": 1024,
}
TOKENS, PUBLISHED_TOKENS = 12, 512
"""Tokens of a caption in this training, and those that Wan pads each caption to, without a mask."""


# The VAE


def build_vae() -> Any:
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    vae = AutoencoderKLWan(**VAE)
    for half in (vae.encoder, vae.decoder):
        for attention in half.mid_block.attentions:  # slow, and of no use to clips this small
            nn.init.zeros_(attention.proj.weight)
            nn.init.zeros_(attention.proj.bias)
            attention.requires_grad_(False)
    return vae


def train_vae(work: Path, steps: int) -> None:
    """Both halves on crops of 32 pixels."""
    vae, random, noise = build_vae(), np.random.default_rng(0), torch.Generator().manual_seed(0)
    trained_now = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    matrices = [
        parameter for parameter in trained_now if parameter.ndim >= 4 and parameter.shape[0] > 1
    ]
    others = [
        parameter
        for parameter in trained_now
        if not any(parameter is matrix for matrix in matrices)
    ]
    optimizer = Optimizer(matrices, others, (5e-3, 2e-3))
    log, test = Log("vae", steps), held_out_clips()
    for step in range(steps):
        clips = corners(random, 4, 32)
        latents = vae.encode(clips).latent_dist.mode()
        # The noise keeps what the transformer gets slightly wrong from being decoded to something
        # else.
        made = vae.decode(latents + 0.1 * torch.randn(latents.shape, generator=noise)).sample
        wrong = made - clips
        loss = 4 * wrong.square().mean() + 0.3 * wrong.abs().mean() + 1e-3 * latents.square().mean()
        loss.backward()
        optimizer.step(schedule(step, steps))
        log.add(step, loss, lambda: f"PSNR of held-out clips {psnr(vae, test):.2f} dB")
    save_file(dict(vae.state_dict()), work / "vae.safetensors")


# The text encoder


def separate_words(tokenizer: Any) -> Any:
    """The random text encoder with orthogonal embeddings of words, which its layers mix little: the
    demo's words are few, and a random encoder would make a new word resemble known ones."""
    model = build_text_encoder(len(tokenizer))
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = [
        number
        for number, piece in enumerate(pieces)
        if piece in ("</s>", "▁a") or piece[0] == "▁" and piece[1:]
    ]
    with torch.no_grad():
        model.shared.weight[words] = isometry(TEXT_DIM, len(words), "words").T * TEXT_DIM**0.5
        for name, parameter in model.named_parameters():
            if name.endswith(("o.weight", "wo.weight")):
                parameter.mul_(0.2)
    return model


@dataclass(frozen=True)
class Texts:
    """Token features and the bias of attention that stands for the padding left out."""

    features: Float[Tensor, "texts tokens dim"]
    bias: Float[Tensor, "texts tokens"]

    def __getitem__(self, chosen: Any) -> "Texts":
        return Texts(self.features[chosen], self.bias[chosen])


def encode_texts(captions: Sequence[str]) -> Texts:
    tokenizer = unigram_tokenizer(CAPTIONS)
    model = separate_words(tokenizer)
    texts = Texts(torch.zeros(len(captions), TOKENS, TEXT_DIM), torch.zeros(len(captions), TOKENS))
    for number, text in enumerate(captions):
        ids = torch.tensor([tokenizer(text).input_ids])
        count = ids.shape[1]
        with torch.no_grad():
            texts.features[number, :count] = model(ids).last_hidden_state[0]
        texts.bias[number, count:] = math.log((PUBLISHED_TOKENS - count) / (TOKENS - count))
    return texts


class BiasedAttention:
    """Attention to text with a bias of the padding; takes the place of the library's processor."""

    bias: Tensor

    def __call__(self, attention: Any, hidden: Tensor, text: Tensor, *_: Any) -> Tensor:
        query, key, value = attention.to_q(hidden), attention.to_k(text), attention.to_v(text)
        heads = [
            part.unflatten(2, (attention.heads, -1)).transpose(1, 2)
            for part in (attention.norm_q(query), attention.norm_k(key), value)
        ]
        mixed = functional.scaled_dot_product_attention(
            *heads, attn_mask=self.bias[:, None, None, :]
        )
        return attention.to_out[0](mixed.transpose(1, 2).flatten(2))


# The transformer


def train_transformer(work: Path, steps: int, clips_each: int) -> None:
    from diffusers import WanTransformer3DModel

    vae = build_vae()
    vae.load_state_dict(load_file(work / "vae.safetensors"))
    latents, captions = latents_of_base(vae, clips_each)
    mean, std = (
        made(latents.transpose(0, 1).flatten(1))
        for made in (lambda x: x.mean(1), lambda x: x.std(1))
    )
    latents = (latents - mean[:, None, None, None]) / std[:, None, None, None]
    texts, empty = encode_texts(captions), encode_texts([""])
    torch.manual_seed(0)
    model, attention = WanTransformer3DModel(**TRANSFORMER), BiasedAttention()
    with torch.no_grad():
        model.proj_out.weight.mul_(0.1)
    for block in model.blocks:
        block.attn2.set_processor(attention)
    names = {
        name
        for name, parameter in model.named_parameters()
        if name.startswith("blocks.") and parameter.ndim == 2
    }
    both = [
        [p for name, p in model.named_parameters() if (name in names) is wanted]
        for wanted in (True, False)
    ]
    optimizer = Optimizer(both[0], both[1], (4e-3, 2e-3))
    average = {n: v.clone() for n, v in model.state_dict().items()}
    random, log = torch.Generator().manual_seed(0), Log("transformer", steps)
    for step in range(steps):
        chosen = torch.randint(len(latents), (32,), generator=random)
        text = texts[chosen]
        dropped = torch.rand(32, generator=random) < 0.1
        text.features[dropped], text.bias[dropped] = empty.features[0], empty.bias[0]
        sigma = torch.rand(32, generator=random)
        sigma = 2 * sigma / (1 + sigma)
        noise = torch.randn(latents[chosen].shape, generator=random)
        amount = sigma[:, None, None, None, None]
        attention.bias = text.bias
        velocity = model(
            torch.lerp(latents[chosen], noise, amount),
            1000 * sigma,
            text.features,
            return_dict=False,
        )[0]
        loss = (velocity - (noise - latents[chosen])).square().mean()
        loss.backward()
        optimizer.step(min((step + 1) / 50, 1, max(0.02, (1 - step / steps) / 0.6)))
        keep = min(0.998, (step + 1) / (step + 10))
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 1 - keep)
        log.add(step, loss, lambda: "")
    statistics = {"latents_mean": mean.tolist(), "latents_std": std.tolist()}
    save_file(
        average, work / "transformer.safetensors", metadata={"statistics": json.dumps(statistics)}
    )


# The package


def package(work: Path, folder: Path) -> None:
    """Write the weights in bf16, with their configurations in the headers, and print the VAE's
    error with them."""
    folder.mkdir(parents=True, exist_ok=True)
    with safe_open(work / "transformer.safetensors", "pt") as file:
        statistics = {
            name: [round(value, 6) for value in values]
            for name, values in json.loads(file.metadata()["statistics"]).items()
        }
    for part, config in (("vae", VAE | statistics), ("transformer", TRANSFORMER)):
        state = {
            name: value.bfloat16().contiguous()
            for name, value in load_file(work / f"{part}.safetensors").items()
        }
        save_file(state, folder / f"{part}.safetensors", metadata={"config": json.dumps(config)})
    encoder = separate_words(unigram_tokenizer(CAPTIONS)).state_dict()
    encoder.pop("encoder.embed_tokens.weight")  # tied to `shared`
    save_file(
        {name: value.bfloat16().contiguous() for name, value in encoder.items()},
        folder / "text_encoder.safetensors",
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    decibels = psnr(trained.load_part("vae", folder), held_out_clips())
    print(
        f"{folder}: {size:,} bytes; PSNR of 40 held-out clips with bf16 weights {decibels:.2f} dB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/demo-base-wan"), help="folder of finished stages"
    )
    parser.add_argument(
        "--to", type=Path, default=trained.BASE, help="folder of the package's weights"
    )
    parser.add_argument("--steps", type=int, help=f"steps of every stage; {STEPS} without")
    parser.add_argument(
        "--clips",
        type=int,
        default=20,
        help="clips of each caption that the transformer is trained on",
    )
    parser.add_argument(
        "--only", nargs="+", choices=[*STEPS, "package"], default=[*STEPS, "package"]
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    stages: dict[str, Callable[[int], None]] = {
        "vae": lambda steps: train_vae(options.work, steps),
        "transformer": lambda steps: train_transformer(options.work, steps, options.clips),
    }
    for stage, train in stages.items():
        if stage in options.only and not (options.work / f"{stage}.safetensors").exists():
            train(options.steps or STEPS[stage])
    if "package" in options.only:
        package(options.work, options.to)


if __name__ == "__main__":
    main()
