"""Modulation that all blocks share, against checkpoints of every kind.

What broke elsewhere: modulation made outside the blocks and handed to them as tuples. A reentrant
checkpoint detaches its tensor arguments only, so the recompute of each block runs backwards into
the one graph that made the modulation, and the second block finds it freed. `StandIn` below is the
smallest model that fails so; it fails only if something before the modulation is trained.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.run_block import CHECKPOINTS
from ditkit_core.testing.combinations import every_pair, every_value
from ditkit_core.testing.world import make_model, outcome
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2

ARCH = Flux2Arch(
    dim=32, heads=2, double_layers=2, single_layers=2, text_dim=12, text_tokens=5, guidance=True,
    in_channels=6, out_channels=6,
    freq_dim=16, axes=(4, 4, 4, 4),
)  # fmt: skip
MODULATION = (
    "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.lin",
    "single_stream_modulation.lin",
)
TRAINED = {
    "every parameter": None,
    "LoRA in the blocks": AdapterConfig(rank=4),
    "LoRA on the modulation": AdapterConfig(rank=4, targets=MODULATION),
    "LoRA on one modulation": AdapterConfig(rank=4, targets=MODULATION[2:]),
    "LoRA on the embedders": AdapterConfig(
        rank=4, targets=("embed.time_in.*", "embed.guidance_in.*")
    ),
    "LoRA in the blocks and on the modulation": AdapterConfig(
        rank=4, targets=("blocks", *MODULATION)
    ),
    "LoRA everywhere": AdapterConfig(rank=4, targets=("*",)),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def items() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        {
            "latents": torch.randn(6, 1, 2, 3, generator=random),
            "text": torch.randn(5, 12, generator=random),
            "reference.0": torch.randn(6, 1, 2, 2, generator=random),
        }
        for _ in range(2)
    ]


def reentrant(model, inputs):
    """An engine that runs each block under the reentrant kind: every tensor of its carry is an
    argument or a result."""
    carry = model.embed(inputs)
    for block in model.blocks():
        carry = reentrant_block(block, carry)
    return model.head(carry)


def reentrant_block(block, carry):
    fields = {name: value for name, value in carry._asdict().items() if isinstance(value, Tensor)}
    after = None

    def body(*tensors: Tensor) -> tuple[Tensor, ...]:
        nonlocal after
        after = block(carry._replace(**dict(zip(fields, tensors, strict=True))))
        return tuple(value for value in after if isinstance(value, Tensor))

    made = iter(checkpoint(body, *fields.values(), use_reentrant=True))
    return type(after)(*(next(made) if isinstance(value, Tensor) else value for value in after))


@cache
def with_plain_outcome(trained: str, dtype: str) -> tuple[Any, Any]:
    """A model and what a step without checkpoints gives; tests only run steps of it."""
    model = make_model(FLUX2, ARCH, dtype=DTYPES[dtype], adapter=TRAINED[trained])
    return model, outcome(FLUX2, model, items(), None)


@pytest.mark.parametrize(("trained", "dtype"), every_value(list(TRAINED), list(DTYPES)))
def test_our_blocks_are_exact_under_reentrant_checkpoints(trained, dtype):
    model, plain = with_plain_outcome(trained, dtype)
    under = outcome(FLUX2, model, items(), reentrant)
    assert under.num_attention == 2 * plain.num_attention
    assert under.differences(plain) == []


@pytest.mark.parametrize(
    ("trained", "dtype", "policy"),
    every_pair(
        [
            "every parameter",
            "LoRA in the blocks",
            "LoRA on the modulation",
            "LoRA on the embedders",
        ],
        list(DTYPES),
        POLICIES,
    ),
)
def test_every_policy_gives_the_gradients_of_none_bitwise(trained, dtype, policy):
    model, plain = with_plain_outcome(trained, dtype)
    assert outcome(FLUX2, model, items(), BlockEngine(policy=policy)).differences(plain) == []
    gradients = {
        name: gradient for name, gradient in plain.gradients.items() if "input" not in name
    }
    for name, parameter in model.named_parameters():
        assert (gradients[name] is not None) == parameter.requires_grad, name
        assert not parameter.requires_grad or float(gradients[name].abs().max()) > 0, name


@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_the_join_is_not_checkpointed(policy, monkeypatch):
    """It has nothing to repeat, and a checkpoint would hold both streams next to the one that it
    makes of them."""
    names = []
    kind = type(parse_policy(policy))
    original = CHECKPOINTS[kind]

    def noted(policy, body, tensors, name):
        names.append(name)
        return original(policy, body, tensors, name)

    monkeypatch.setitem(CHECKPOINTS, kind, noted)
    model = make_model(FLUX2, ARCH)
    outcome(FLUX2, model, items(), BlockEngine(policy=policy))
    assert names == ["block 0", "block 1", "block 3", "block 4"]


class StandIn(nn.Module):
    """Blocks that share one modulation, made outside of them: x + gate · tanh(W(x · (1 + scale) +
    shift))."""

    def __init__(self, blocks: int, as_tuple: bool, use_reentrant: bool):
        super().__init__()
        self.modulation = nn.Linear(4, 3 * 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.as_tuple, self.use_reentrant = as_tuple, use_reentrant

    def forward(self, x: Tensor, time: Tensor, checkpointed: bool) -> Tensor:
        modulation = self.modulation(time)
        if self.as_tuple:
            modulation = modulation.chunk(3, -1)

        def run(block, x, modulation):
            shift, scale, gate = modulation if self.as_tuple else modulation.chunk(3, -1)
            return x + gate * torch.tanh(block(x * (1 + scale) + shift))

        for block in self.blocks:
            if checkpointed:
                x = checkpoint(run, block, x, modulation, use_reentrant=self.use_reentrant)
            else:
                x = run(block, x, modulation)
        return x


def gradients_of_stand_in(
    checkpointed: bool,
    *,
    blocks: int = 2,
    as_tuple: bool,
    use_reentrant: bool,
    trained: bool = True,
):
    torch.manual_seed(0)
    model = StandIn(blocks, as_tuple, use_reentrant)
    model.modulation.requires_grad_(trained)
    x = torch.randn(3, 4, requires_grad=True)
    model(x, torch.randn(1, 4), checkpointed).square().sum().backward()
    return [
        x.grad,
        *(parameter.grad for parameter in model.parameters() if parameter.requires_grad),
    ]


def test_a_tuple_of_modulation_breaks_reentrant_checkpoints_of_two_blocks():
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients_of_stand_in(True, as_tuple=True, use_reentrant=True)


@pytest.mark.parametrize(
    "works",
    [
        {"as_tuple": False, "use_reentrant": True},
        {"as_tuple": False, "use_reentrant": False},
        {"as_tuple": True, "use_reentrant": False},
        {"as_tuple": True, "use_reentrant": True, "trained": False},
        {"as_tuple": True, "use_reentrant": True, "blocks": 1},
    ],
    ids=[
        "one tensor",
        "one tensor, not reentrant",
        "not reentrant",
        "frozen modulation",
        "one block",
    ],
)
def test_one_tensor_is_exact_and_a_tuple_is_where_nothing_runs_backwards_twice(works):
    pairs = zip(
        gradients_of_stand_in(True, **works), gradients_of_stand_in(False, **works), strict=True
    )
    assert all(torch.equal(ours, plain) for ours, plain in pairs)
