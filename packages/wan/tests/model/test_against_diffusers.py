"""Our transformer against `WanTransformer3DModel` with the same weights: outputs, parameter and
input gradients."""

import diffusers_pairs
import pytest
import torch
from diffusers_pairs import assert_close, compared, exact_diffusers
from torch import Tensor

from ditkit_core.models.precision import Precision
from ditkit_wan.model.transformer import WanInputs, WanTransformer
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN
from ditkit_wan.state_dict import to_native


def pair(
    head_dim: int, *, dtype: torch.dtype, heads: int = 2
) -> tuple[WanTransformer, torch.nn.Module]:
    """Ours and diffusers' of text to video, with equal random weights."""
    arch = WanArch(
        dim=heads * head_dim, ffn_dim=56, heads=heads, layers=2, in_channels=4, out_channels=4,
        text_dim=20, text_tokens=6,
        freq_dim=24,
    )  # fmt: skip
    return diffusers_pairs.pair(arch, dtype=dtype)


def inputs(dtype: torch.dtype, batch: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    latents = (
        torch.randn(batch, 4, 2, 6, 8, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    text = (
        torch.randn(batch, 6, 20, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    target = torch.randn(batch, 4, 2, 6, 8, generator=generator, dtype=torch.float64)
    return latents, text, torch.tensor([731.25, 12.5][:batch], dtype=torch.float64), target


def per_token(batch: int, tokens: int) -> Tensor:
    """A timestep for every token, no two alike, as image-to-video models give them."""
    return (
        torch.linspace(3.5, 931.25, batch * tokens, dtype=torch.float64)
        .reshape(batch, tokens)
        .flip(0)
    )


def both(ours, theirs, dtype: torch.dtype, batch: int = 2, timestep: Tensor | None = None):
    """[(name, our tensor, their tensor)] of output, input gradients and every parameter
    gradient."""
    latents, text, per_sample, _ = inputs(dtype, batch)
    return compared(
        ours,
        theirs,
        {"latents": latents, "text": text},
        per_sample if timestep is None else timestep,
    )


@pytest.mark.parametrize("head_dim", [12, 16, 24, 128])
def test_fp64_equals_diffusers_run_in_fp64(head_dim, monkeypatch):
    ours, theirs = pair(head_dim, dtype=torch.float64)
    exact_diffusers(monkeypatch)
    assert_close(both(ours, theirs, torch.float64), 1e-10)


@pytest.mark.parametrize(("head_dim", "batch"), [(12, 2), (16, 1), (16, 2), (24, 2), (128, 2)])
def test_fp32_equals_diffusers(head_dim, batch):
    """1e-5: diffusers' sinusoid is fp32 (7.6e-5 at worst in one feature), everything else is
    summation order."""
    ours, theirs = pair(head_dim, dtype=torch.float32)
    assert_close(both(ours, theirs, torch.float32, batch), 1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_timestep_per_token_equals_diffusers(batch):
    """The path of diffusers' `expand_timesteps`; 1e-5 as above."""
    ours, theirs = pair(16, dtype=torch.float32)
    assert_close(both(ours, theirs, torch.float32, batch, per_token(batch, 24)), 1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_timestep_per_token_equals_diffusers_run_in_fp64(batch, monkeypatch):
    ours, theirs = pair(16, dtype=torch.float64)
    exact_diffusers(monkeypatch)
    assert_close(both(ours, theirs, torch.float64, batch, per_token(batch, 24)), 1e-10)


@pytest.mark.parametrize("batch", [1, 2])
def test_equal_timesteps_of_all_tokens_are_the_timestep_of_the_sample(batch):
    """fp64, 1e-12: sums over as many rows as tokens instead of one."""
    (ours, _), (latents, text, timestep, target) = (
        pair(16, dtype=torch.float64),
        inputs(torch.float64, batch),
    )

    def gradients(timestep: Tensor) -> dict[str, Tensor]:
        latents.grad = text.grad = None
        ours.zero_grad()
        out = torch.stack(ours(WanInputs(list(latents), timestep, list(text))))
        (out - target).square().mean().backward()
        return {"output": out, "latents": latents.grad, "text": text.grad} | {
            name: parameter.grad for name, parameter in ours.named_parameters()
        }

    sample, tokens = gradients(timestep), gradients(timestep[:, None].expand(-1, 24))
    assert_close([(name, tokens[name], sample[name]) for name in sample], 1e-12)


def test_samples_of_different_size_with_timesteps_per_token_equal_diffusers_on_each_alone():
    """Timesteps on padding change nothing. 1e-5 as above; gradients of weights are sums over the
    samples."""
    ours, theirs = pair(16, dtype=torch.float32)
    random = torch.Generator().manual_seed(3)
    sizes = [
        (4, 2, 4, 6),
        (4, 2, 6, 8),
        (4, 2, 6, 4),
    ]  # 12, 24 and 12 tokens, the last in a grid of its own
    latents = [torch.randn(size, generator=random).requires_grad_() for size in sizes]
    text = torch.randn(3, 6, 20, generator=random).requires_grad_()
    target = [torch.randn(size, generator=random) for size in sizes]
    timestep, lengths = per_token(3, 24), [12, 24, 12]
    outputs = ours(WanInputs(latents, timestep, list(text)))
    sum((out - goal).square().sum() for out, goal in zip(outputs, target, strict=True)).backward()
    mine = [(out, x.grad.clone()) for out, x in zip(outputs, latents, strict=True)]
    d_text, text.grad = text.grad.clone(), None

    pairs = []
    for i, (x, goal, length) in enumerate(zip(latents, target, lengths, strict=True)):
        x.grad = None
        out = theirs(
            hidden_states=x[None],
            timestep=timestep[i : i + 1, :length],
            encoder_hidden_states=text[i : i + 1],
        ).sample[0]
        (out - goal).square().sum().backward()
        pairs += [("output", mine[i][0], out), (f"latents {i}", mine[i][1], x.grad)]
    named = dict(ours.named_parameters())
    pairs += [(name, named[to_native(name)].grad, p.grad) for name, p in theirs.named_parameters()]
    assert_close([*pairs, ("text", d_text, text.grad)], 1e-5)


def test_bf16_is_closer_to_fp64_than_diffusers(monkeypatch):
    """Same bf16 weights, same inputs; diffusers as `from_pretrained(torch_dtype=bf16)` leaves it:
    its fp32 modules kept."""
    ours, theirs = pair(16, dtype=torch.float32)
    keep = theirs._keep_in_fp32_modules
    for name, parameter in theirs.named_parameters():
        parameter.data = parameter.data.bfloat16().float()  # equal values for all three
        if not any(part in name.split(".") for part in keep):
            parameter.data = parameter.data.bfloat16()
    state = {to_native(name): tensor for name, tensor in theirs.state_dict().items()}
    exact = WanTransformer(ours.embed.arch, Precision(matmul=torch.float64)).double()
    exact.load_state_dict(state)
    half = WanTransformer(ours.embed.arch, Precision(matmul=torch.bfloat16))
    for name, parameter in half.named_parameters():
        parameter.data = (
            state[name].float() if WAN.precision.keep_fp32(name) else state[name].bfloat16()
        )

    latents, text, timestep, _ = inputs(torch.float64)
    latents, text = latents.detach().bfloat16().double(), text.detach().bfloat16().double()

    def error(out: Tensor) -> float:
        return float((out.double() - truth).norm() / truth.norm())

    with torch.no_grad():
        truth = torch.stack(exact(WanInputs(list(latents), timestep, list(text))))
        mine = torch.stack(
            half(WanInputs(list(latents.bfloat16()), timestep, list(text.bfloat16())))
        )
        them = theirs(
            hidden_states=latents.bfloat16(),
            timestep=timestep.float(),
            encoder_hidden_states=text.bfloat16(),
        ).sample
    assert error(mine) < error(them)
    assert error(mine) < 1e-2
