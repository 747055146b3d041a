"""The hand-written elementwise functions against their plain composition, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ditkit_wan.norm import gated_sum, modulated_norm, normalised_heads
from ditkit_wan.rope import rotary_angles, rotate


def norm_of(dim: int, dtype: torch.dtype = torch.float64) -> nn.RMSNorm:
    norm = nn.RMSNorm(dim, eps=1e-6, dtype=dtype)
    norm.weight.data = 1 + 0.3 * torch.randn(dim, dtype=dtype)
    return norm


def tables(tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = rotary_angles((tokens, 1, 1), head_dim, torch.device("cpu"))[None, :, None]
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("rotated", [False, True])
def test_norm_and_rotation_equal_the_composition_in_fp64(rotated):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    norm, rotary = norm_of(24), tables(5, 12) if rotated else None
    ours = normalised_heads(x, norm, 2, torch.float64, rotary)
    plain = F.rms_norm(x, (24,), norm.weight, 1e-6).unflatten(-1, (2, -1))
    plain = rotate(plain, *rotary) if rotary else plain
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(plain)
    inputs = (x, norm.weight)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(plain, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rotated", [False, True])
def test_gradients_of_norm_and_rotation_pass_gradcheck(rotated):
    torch.manual_seed(0)
    rotary = tables(3, 6) if rotated else None
    x = torch.randn(1, 3, 12, dtype=torch.float64, requires_grad=True)
    norm = norm_of(12)

    def function(x, weight):
        norm.weight = nn.Parameter(weight) if not isinstance(weight, nn.Parameter) else weight
        return normalised_heads(x, norm, 2, torch.float64, rotary)

    assert torch.autograd.gradcheck(lambda x: function(x, norm.weight), (x,))


def test_norm_and_rotation_round_once_and_leave_their_inputs_alone():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 24).bfloat16().requires_grad_()
    norm, (cos, sin) = norm_of(24, torch.float32), tables(5, 12)
    before = x.detach().clone()
    out = normalised_heads(x, norm, 2, torch.float32, (cos.float(), sin.float()))
    exact = rotate(F.rms_norm(x.double(), (24,), norm.weight.double(), 1e-6).unflatten(-1, (2, -1)), cos, sin)
    assert out.dtype == torch.bfloat16 and torch.equal(x, before)
    assert torch.equal(out, exact.bfloat16())
    upstream = torch.randn_like(out)
    kept = upstream.clone()
    out.backward(upstream)
    assert torch.equal(upstream, kept) and x.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("times", [1, 5])
def test_the_gated_sum_equals_the_composition(times, trained):
    torch.manual_seed(0)
    x, y = (torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gate = torch.randn(2, times, 8, dtype=torch.float64, requires_grad=trained)
    assert torch.equal(gated_sum(y, x, gate), torch.addcmul(x, y, gate))
    assert torch.autograd.gradcheck(gated_sum, (y, x, gate))


@pytest.mark.parametrize(("batch", "times"), [(1, 1), (2, 1), (2, 5)])
def test_the_modulated_norm_equals_the_composition(batch, times):
    torch.manual_seed(0)
    x = torch.randn(batch, 5, 8, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.randn(batch, times, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = F.layer_norm(x, (8,), eps=1e-6) * (1 + scale) + shift
    torch.testing.assert_close(modulated_norm(x, scale, shift, 1e-6), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *t: modulated_norm(*t, 1e-6), (x, scale, shift))


@pytest.mark.parametrize(("policy", "repeated"), [("full", 9), ("attn_only", 9)])
def test_the_last_matmul_of_a_block_is_never_recomputed(policy, repeated):
    """Ten frozen matmuls in a block; recomputing the last one would cost a tenth to a seventh of a forward."""
    from ditkit_core.activation_checkpoint import Engine
    from ditkit_core.adapters import AdapterConfig
    from ditkit_core.testing.world import make_model
    from ditkit_wan.presets import WanArch
    from ditkit_wan.spec import WAN

    arch = WanArch(
        dim=24, ffn_dim=40, heads=2, layers=2, in_channels=4, out_channels=4, text_dim=5, text_tokens=3, freq_dim=8
    )
    model = make_model(WAN, arch, adapter=AdapterConfig(rank=2, targets=("q,k,v,o",)))
    items = [{"latents": torch.randn(4, 1, 4, 4), "text": torch.randn(3, 5)}]

    def num_frozen_matmuls(policy: str) -> int:
        inputs = WAN.make_inputs([items[0]["latents"]], torch.tensor([0.5]), items)
        with CountAddmm() as count:
            model(inputs, run=Engine(policy=policy))[0].sum().backward()
        return count.number

    assert num_frozen_matmuls(policy) - num_frozen_matmuls("none") == repeated * arch.layers


class CountAddmm(TorchDispatchMode):
    """Counts matmuls with a bias, which are the frozen ones, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_the_residual_stream_of_a_bf16_model_is_never_rounded_to_bf16():
    """With a feed-forward that adds nothing, what leaves a block is the stream as cross-attention left it."""
    from ditkit_core.testing.world import make_model
    from ditkit_wan.presets import WanArch
    from ditkit_wan.spec import WAN

    arch = WanArch(
        dim=24, ffn_dim=40, heads=2, layers=2, in_channels=4, out_channels=4, text_dim=5, text_tokens=3, freq_dim=8
    )
    model = make_model(WAN, arch, dtype=torch.bfloat16)
    for block in model.blocks():
        block.ffn[2].weight.data.zero_()
        block.ffn[2].bias.data.zero_()
    carry = model.embed(WAN.make_inputs([torch.randn(4, 1, 4, 4)], torch.tensor([0.5]), [{"text": torch.randn(3, 5)}]))
    for block in model.blocks():
        carry = block(carry)
        assert carry.tokens.dtype == torch.float32
        assert (carry.tokens != carry.tokens.bfloat16().float()).float().mean() > 0.9
