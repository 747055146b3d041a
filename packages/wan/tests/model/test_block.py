"""What a block of Wan repeats when it is recomputed, and where its residual stream is rounded."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.testing.world import make_model
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

ARCH = WanArch(
    dim=24,
    ffn_dim=40,
    heads=2,
    layers=2,
    in_channels=4,
    out_channels=4,
    text_dim=5,
    text_tokens=3,
    freq_dim=8,
)


@pytest.mark.parametrize(("policy", "repeated"), [("full", 9), ("attn_only", 9)])
def test_the_last_matmul_of_a_block_is_never_recomputed(policy, repeated):
    """Ten frozen matmuls in a block; recomputing the last one would cost a tenth to a seventh of a
    forward."""
    model = make_model(WAN, ARCH, adapter=AdapterConfig(rank=2, targets=("q,k,v,o",)))
    items = [{"latents": torch.randn(4, 1, 4, 4), "text": torch.randn(3, 5)}]

    def num_frozen_matmuls(policy: str) -> int:
        inputs = WAN.training.make_inputs([items[0]["latents"]], torch.tensor([0.5]), items, 1.0)
        with CountAddmm() as count:
            model(inputs, engine=BlockEngine(policy=policy))[0].sum().backward()
        return count.number

    assert num_frozen_matmuls(policy) - num_frozen_matmuls("none") == repeated * ARCH.layers


class CountAddmm(TorchDispatchMode):
    """Counts matmuls with a bias, which are the frozen ones, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_the_residual_stream_of_a_bf16_model_is_never_rounded_to_bf16():
    """With a feed-forward that adds nothing, what leaves a block is the stream as cross-attention
    left it."""
    model = make_model(WAN, ARCH, dtype=torch.bfloat16)
    for block in model.blocks():
        block.ffn[2].weight.data.zero_()
        block.ffn[2].bias.data.zero_()
    items = [{"text": torch.randn(3, 5)}]
    carry = model.embed(
        WAN.training.make_inputs([torch.randn(4, 1, 4, 4)], torch.tensor([0.5]), items, 1.0)
    )
    for block in model.blocks():
        carry = block(carry)
        assert carry.tokens.dtype == torch.float32
        assert (carry.tokens != carry.tokens.bfloat16().float()).float().mean() > 0.9
