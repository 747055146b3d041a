"""The part of tools/gpu/gpu_truth.py that comes last: rates of the attention backends, and of a VAE
in fp32 with and without TF32."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from device_clock import attempted, milliseconds, of_published, seconds
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.attention.support import SUPPORT, Support
from ditkit_core.nn.context import BlockSettings, block_settings

Rows = Iterator[dict[str, Any]]
WHOLE = ("sdpa_math", "exact")
"""Backends that compute all scores in memory, or one span after the other: for comparisons, not for
speed."""


def backends(device: torch.device, tiny: bool) -> Rows:
    """Each attention backend that is there, at the tokens of 480p and of 720p clips; then a VAE of
    real size."""
    for tokens in (64,) if tiny else (20_280, 75_600):
        for name, support in SUPPORT.items():
            if name not in WHOLE and device.type in (support.devices or (device.type,)):
                title = f"{name}, {tokens} tokens"
                if support.module is not None and not _is_there(support.module):
                    yield {"name": title, "value": f"{support.module} is not installed"}
                    continue
                yield from attempted(
                    title, partial(_attention, name, support, (tokens, 2 if tiny else 40), device)
                )
    yield from attempted("VAE", partial(_vae, device, tiny))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _attention(name: str, support: Support, size: tuple[int, int], device: torch.device) -> Rows:
    tokens, heads = size
    q, k, v = (
        torch.randn(
            1,
            tokens,
            heads,
            128,
            device=device,
            dtype=torch.bfloat16,
            requires_grad=support.has_backward,
        )
        for _ in range(3)
    )
    given = torch.randn_like(q)
    with block_settings(BlockSettings(backend=name)):
        forward = partial(attend, q, k, v, name="self")
        out = forward()  # a compiler may run first
        ahead = min(seconds(forward, device) for _ in range(3))
        row, work = {"forward": milliseconds(ahead)}, 4 * tokens**2 * heads * 128
        rates = [work / ahead]
        if support.has_backward:
            backward = partial(torch.autograd.grad, out, (q, k, v), given, retain_graph=True)
            backward()
            back = min(seconds(backward, device) for _ in range(3))
            row["backward"] = milliseconds(back)
            rates.append(2.5 * work / back)  # five products in place of two
    share = of_published(max(rates), lambda gpu: gpu.bf16_flops, device)
    yield {
        "name": f"{name}, {tokens} tokens",
        **row,
        "TFLOP/s": " / ".join(f"{rate / 1e12:.0f}" for rate in rates),
        **share,
    }


def _vae(device: torch.device, tiny: bool) -> Rows:
    """Encoding of 17 frames in 480p with random weights, with convolutions in fp32 as the commands
    have them, and in TF32."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    with device:
        vae = (
            AutoencoderKLWan(**({"base_dim": 8, "z_dim": 4} if tiny else {}))
            .requires_grad_(False)
            .eval()
        )
        clip = torch.rand(1, 3, *((5, 16, 16) if tiny else (17, 480, 832)))
    found, taken = [], []
    for allowed in (False, True):
        torch.backends.cudnn.allow_tf32 = allowed
        try:
            vae.encode(clip)  # cuDNN chooses its kernels
            taken.append(
                min(
                    seconds(lambda: found.append(vae.encode(clip).latent_dist.mean), device)
                    for _ in range(2)
                )
            )
        finally:
            torch.backends.cudnn.allow_tf32 = False
    apart = float((found[-1] - found[0]).norm() / found[0].norm())
    yield {"name": "VAE in fp32", "forward": milliseconds(taken[0])}
    yield {"name": "VAE in TF32", "forward": milliseconds(taken[1]), "difference": apart}
