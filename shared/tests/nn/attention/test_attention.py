"""What `attend` asks of a backend and refuses, the settings that are in force, and the mark on a
block's last step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_tensors import Called, fake_kernel, qkv
from torch import Tensor, nn

from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.run_block import run_block
from ditkit_core.errors import UserError
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.attention.backends import BACKENDS, Backend
from ditkit_core.nn.context import BlockSettings, block_settings, settings_in_force
from ditkit_core.nn.remat import recompute_boundary


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A backend `fake` that takes everything; tests replace what it can do."""
    backend = replace(BACKENDS["sdpa"], kernel=fake_kernel)
    monkeypatch.setitem(BACKENDS, "fake", backend)
    return backend


# attend


def test_sdpa_is_softmax_of_scaled_products_and_sees_no_masked_key():
    q, k, v = qkv(torch.float64)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    expected = torch.einsum(
        "bhqk,bkhd->bqhd", weights.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1), v
    )
    assert torch.allclose(
        attend(q, k, v, name="self", padding_mask=mask), expected, rtol=0, atol=1e-14
    )
    assert torch.allclose(attend(q, k, v, name="self"), torch.einsum("bhqk,bkhd->bqhd",
        weights.softmax(-1), v), rtol=0, atol=1e-14)  # fmt: skip


@pytest.mark.parametrize(
    ("can", "given", "dtype", "message"),
    [
        (
            {"takes_mask": False}, {"padding_mask": torch.ones(2, 7, dtype=torch.bool)}, torch.float32,
            "attention backend 'fake' takes no mask: batch samples of one size only, or use sdpa",
        ),
        (
            {"takes_dropout": False}, {"dropout": 0.1}, torch.float32,
            "attention backend 'fake' has no dropout: set it to 0, or use sdpa",
        ),
        ({"half_only": True}, {}, torch.float32, "attention backend 'fake' runs in bf16 or fp16 only, not torch.float32; use sdpa"),
        ({"half_only": True}, {}, torch.float64, "attention backend 'fake' runs in bf16 or fp16 only, not torch.float64; use sdpa"),
        ({"devices": ("cuda",)}, {}, torch.float32, "attention backend 'fake' runs on cuda only, not on cpu; use sdpa"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keep", [None, ()])
def test_what_a_backend_cannot_take_is_refused_before_it_runs(
    monkeypatch, fake, can, given, dtype, message, keep
):
    monkeypatch.setitem(BACKENDS, "fake", replace(fake, **can))
    with (
        block_settings(BlockSettings(backend="fake", keep=keep)),
        pytest.raises(UserError) as refused,
    ):
        attend(*qkv(dtype), name="self", **given)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("can", "given", "dtype"),
    [
        ({}, {"padding_mask": torch.ones(2, 7, dtype=torch.bool), "dropout": 0.1}, torch.float32),
        ({"takes_mask": False, "takes_dropout": False}, {}, torch.float32),
        ({"half_only": True}, {}, torch.bfloat16),
        ({"half_only": True}, {}, torch.float16),
    ],
)
def test_what_a_backend_can_take_reaches_it(monkeypatch, fake, can, given, dtype):
    monkeypatch.setitem(BACKENDS, "fake", replace(fake, **can))
    with block_settings(BlockSettings(backend="fake")), pytest.raises(Called):
        attend(*qkv(dtype), name="self", **given)


# Settings


def test_settings_hold_inside_their_block_and_are_restored_also_after_an_error():
    outer, inner = BlockSettings(backend="flash2"), BlockSettings(keep=())
    assert settings_in_force() == BlockSettings()
    with block_settings(outer):
        with pytest.raises(Called), block_settings(inner):
            assert settings_in_force() is inner
            raise Called
        assert settings_in_force() is outer
    assert settings_in_force() == BlockSettings(backend="sdpa", keep=None)


# recompute_boundary


class Gated(nn.Module):
    """A block of one layer before its last step, which counts how often each ran."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), last
        self.runs = {"first": 0, "last": 0}
        for name in self.runs:
            self.get_submodule(name).register_forward_hook(lambda *_, name=name: self.count(name))

    def count(self, name: str) -> None:
        self.runs[name] += 1

    def forward(self, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, gate = carry
        return x + recompute_boundary(self.last, self.first(x).sin()) * gate, gate


def gradients(block: Gated, policy: str) -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
    out, _ = run_block(block, (x, torch.tensor(0.5)), policy=parse_policy(policy), name="block")
    out.square().sum().backward()
    trained = {name: p.grad for name, p in block.named_parameters() if p.requires_grad}
    return {"output": out.detach(), "x": x.grad} | trained


def matmul(*, trained: bool = False) -> nn.Module:
    return nn.Linear(6, 6).requires_grad_(trained)


def more_than_a_matmul() -> nn.Module:
    """Keeps more for its backward than its input."""
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh()).requires_grad_(False)


@pytest.mark.parametrize(
    ("last", "policy", "runs"),
    [
        (matmul, "none", 1),
        (matmul, "attn_only", 1),
        (partial(matmul, trained=True), "none", 1),
        # a gate that is trained with it needs its output
        (partial(matmul, trained=True), "attn_only", 2),
        (more_than_a_matmul, "none", 1),
        (more_than_a_matmul, "attn_only", 2),
    ],
)
def test_a_frozen_last_matmul_and_no_other_layer_is_left_out_of_a_recompute_that_keeps_regions(
    last, policy, runs
):
    plain, block = Gated(last()), Gated(last())
    block.load_state_dict(plain.state_dict())
    expected, found = gradients(plain, "none"), gradients(block, policy)
    assert expected.keys() == found.keys() and all(
        torch.equal(expected[name], found[name]) for name in expected
    )
    assert block.runs == {"first": 1 if policy == "none" else 2, "last": runs}


def test_outside_a_recompute_that_keeps_regions_a_boundary_is_a_plain_call(monkeypatch):
    from ditkit_core.nn import remat as module

    monkeypatch.setattr(module, "remat", None)
    layer, h = matmul(), torch.randn(4, 6)
    assert torch.equal(recompute_boundary(layer, h), layer(h))
    with block_settings(BlockSettings(keep=())), pytest.raises(AttributeError):
        recompute_boundary(layer, h)
