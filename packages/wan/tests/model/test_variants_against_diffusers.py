"""The variants against diffusers' transformers with the same weights: outputs, gradients of inputs
and of every parameter.

1e-5 in fp32, because diffusers' sinusoid is fp32; 1e-10 where diffusers is made to run in fp64.
"""

from typing import Any

import pytest
import torch
from diffusers_pairs import assert_close, compared, exact_diffusers, pair, random_inputs

from ditkit_wan.model.inputs import make_inputs
from ditkit_wan.presets import WanArch
from ditkit_wan.state_dict import to_native

SIZES: dict[str, Any] = {
    "dim": 32, "ffn_dim": 40, "heads": 2, "layers": 2, "out_channels": 4, "text_dim": 12,
    "freq_dim": 16,
}  # fmt: skip
GRID = (2, 4, 6)
TIMESTEPS = torch.tensor([731.25, 12.5], dtype=torch.float64)


def i2v(dtype: torch.dtype, batch: int, **extra: int) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Diffusers splits image tokens from exactly 512 rows of text."""
    arch = WanArch(**SIZES, in_channels=10, image_dim=16, **extra)
    theirs: dict[str, Any] = {"image_dim": 16, "added_kv_proj_dim": 32}
    if arch.image_positions:
        theirs["pos_embed_seq_len"] = arch.image_positions
    shapes = {
        "latents": (4, *GRID),
        "text": (512, 12),
        "y": (6, *GRID),
        "image": (arch.image_tokens, 16),
    }
    given = random_inputs({name: (batch, *shape) for name, shape in shapes.items()}, dtype)
    return *pair(arch, dtype=dtype, **theirs), given


@pytest.mark.parametrize("batch", [1, 2])
def test_i2v_equals_diffusers(batch):
    ours, theirs, given = i2v(torch.float32, batch)
    assert_close(compared(ours, theirs, given, TIMESTEPS[:batch]), 1e-5)


def test_i2v_equals_diffusers_run_in_fp64(monkeypatch):
    ours, theirs, given = i2v(torch.float64, 2)
    exact_diffusers(monkeypatch)
    assert_close(compared(ours, theirs, given, TIMESTEPS), 1e-10)


@pytest.mark.parametrize("batch", [1, 2])
def test_flf2v_equals_diffusers(batch):
    ours, theirs, given = i2v(torch.float32, batch, image_positions=6)
    assert_close(compared(ours, theirs, given, TIMESTEPS[:batch]), 1e-5)


def test_flf2v_equals_diffusers_run_in_fp64(monkeypatch):
    ours, theirs, given = i2v(torch.float64, 2, image_positions=6)
    exact_diffusers(monkeypatch)
    assert_close(compared(ours, theirs, given, TIMESTEPS), 1e-10)


def a14b_i2v(dtype: torch.dtype) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """More channels and no CLIP."""
    arch = WanArch(**SIZES, in_channels=10)
    shapes = {"latents": (4, *GRID), "text": (512, 12), "y": (6, *GRID)}
    return *pair(arch, dtype=dtype), random_inputs(
        {name: (2, *shape) for name, shape in shapes.items()}, dtype
    )


def test_a14b_i2v_equals_diffusers():
    assert_close(compared(*a14b_i2v(torch.float32), TIMESTEPS), 1e-5)


def test_a14b_i2v_equals_diffusers_run_in_fp64(monkeypatch):
    case = a14b_i2v(torch.float64)
    exact_diffusers(monkeypatch)
    assert_close(compared(*case, TIMESTEPS), 1e-10)


def vace(dtype: torch.dtype, batch: int) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Hints behind the first block and the last but one, so that blocks without one stand between
    and after them."""
    sizes = SIZES | {"layers": 5}
    arch = WanArch(**sizes, in_channels=4, vace_layers=(0, 2, 3), vace_channels=7, text_tokens=9)
    shapes = {"latents": (4, *GRID), "text": (9, 12), "vace": (7, *GRID)}
    given = random_inputs({name: (batch, *shape) for name, shape in shapes.items()}, dtype)
    return *pair(arch, dtype=dtype, vace=True, vace_layers=[0, 2, 3], vace_in_channels=7), given


@pytest.mark.parametrize("batch", [1, 2])
def test_vace_equals_diffusers(batch):
    """Diffusers runs all VACE blocks before the others; ours run between them."""
    assert_close(compared(*vace(torch.float32, batch), TIMESTEPS[:batch]), 1e-5)


def test_vace_equals_diffusers_run_in_fp64(monkeypatch):
    case = vace(torch.float64, 2)
    exact_diffusers(monkeypatch)
    assert_close(compared(*case, TIMESTEPS), 1e-10)


def ti2v(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *with_first_frame: bool) -> Any:
    """What `make_inputs` makes of items against diffusers on what its image-to-video pipeline makes
    of them."""
    arch = WanArch(**SIZES | {"out_channels": 6}, in_channels=6, token_times=True, text_tokens=9)
    ours, theirs = pair(arch, dtype=dtype)
    batch = len(with_first_frame)
    shapes = {"noised": (6, 3, 4, 6), "first_frame": (6, 1, 4, 6), "text": (9, 12)}
    given = random_inputs({name: (batch, *shape) for name, shape in shapes.items()}, dtype)
    sigma = TIMESTEPS[:batch] / 1000
    items = [
        {"latents": torch.zeros(6, 3, 4, 6), "text": given["text"][i]}
        | ({"first_frame": given["first_frame"][i]} if clean else {})
        for i, clean in enumerate(with_first_frame)
    ]
    goal = random_inputs({"goal": (batch, 6, 3, 4, 6)}, torch.float64)["goal"].detach()

    def gradients(out: torch.Tensor) -> dict[str, torch.Tensor]:
        (out.double() - goal).square().mean().backward()
        found = {name: tensor.grad for name, tensor in given.items() if tensor.grad is not None}
        for tensor in given.values():
            tensor.grad = None
        return found

    out = torch.stack(ours(make_inputs(list(given["noised"]), sigma, items, 1.0)))
    mine = gradients(out)
    # expand_timesteps: a mask over latents that is 0 on a clean first frame, thinned to a token
    # each
    mask = torch.ones(batch, 1, 3, 4, 6, dtype=dtype)
    mask[torch.tensor(with_first_frame), :, 0] = 0
    hidden = (1 - mask) * given["first_frame"] + mask * given["noised"]
    per_token = (mask[:, 0, :, ::2, ::2].double() * 1000 * sigma[:, None, None, None]).flatten(1)
    if dtype == torch.float64:
        exact_diffusers(monkeypatch)
    their_out = theirs(hidden, per_token, given["text"], return_dict=False)[0]
    pairs = [("output", out, their_out)]
    pairs += [
        (name, mine.get(name, torch.zeros(())), gradient)
        for name, gradient in gradients(their_out).items()
    ]
    named = dict(ours.named_parameters())
    return pairs + [
        (name, named[to_native(name)].grad, p.grad) for name, p in theirs.named_parameters()
    ]


@pytest.mark.parametrize("with_first_frame", [(True,), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["fp32", "fp64"]
)
def test_ti2v_equals_diffusers(dtype, tolerance, with_first_frame, monkeypatch):
    assert_close(ti2v(dtype, monkeypatch, *with_first_frame), tolerance)
