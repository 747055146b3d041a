"""Backends of attention: what each takes, what is refused and how, and the settings that are in force."""

import sys
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ditkit_core import attention
from ditkit_core.activation_checkpoint import run_block
from ditkit_core.attention import (
    BACKENDS,
    AttentionSettings,
    attend,
    attention_settings,
    check_backend,
    settings_in_force,
)  # fmt: skip
from ditkit_core.errors import UserError
from ditkit_core.last_step import last_step


def qkv(dtype: torch.dtype = torch.float32, *, keys: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, 3, 8, generator=random).to(dtype) for length in (5, keys, keys))
    return q, k, v


class Called(Exception):
    """The fake kernel ran."""


def fake_kernel(*given: Any) -> Tensor:
    raise Called


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> attention.Backend:
    """A backend `fake` that takes everything; tests replace what it can do."""
    backend = replace(BACKENDS["sdpa"], kernel=fake_kernel)
    monkeypatch.setitem(BACKENDS, "fake", backend)
    return backend


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A stand-in for a package that is not there."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


# attend


def test_sdpa_is_softmax_of_scaled_products_and_sees_no_masked_key():
    q, k, v = qkv(torch.float64)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", weights.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1), v)
    assert torch.allclose(attend(q, k, v, name="self", key_mask=mask), expected, rtol=0, atol=1e-14)
    assert torch.allclose(attend(q, k, v, name="self"), torch.einsum("bhqk,bkhd->bqhd", weights.softmax(-1), v), rtol=0, atol=1e-14)  # fmt: skip


@pytest.mark.parametrize(
    ("can", "given", "dtype", "message"),
    [
        (
            {"takes_mask": False}, {"key_mask": torch.ones(2, 7, dtype=torch.bool)}, torch.float32,
            "attention backend 'fake' takes no mask: batch samples of one size, or use sdpa",
        ),
        (
            {"takes_dropout": False}, {"dropout": 0.1}, torch.float32,
            "attention backend 'fake' has no dropout: set it to 0, or use sdpa",
        ),
        ({"half_only": True}, {}, torch.float32, "attention backend 'fake' runs in bf16 or fp16 only, not torch.float32; use sdpa"),
        ({"half_only": True}, {}, torch.float64, "attention backend 'fake' runs in bf16 or fp16 only, not torch.float64; use sdpa"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keep", [False, True])
def test_what_a_backend_cannot_take_is_refused_before_it_runs(monkeypatch, fake, can, given, dtype, message, keep):
    monkeypatch.setitem(BACKENDS, "fake", replace(fake, **can))
    with attention_settings(AttentionSettings(backend="fake", keep=keep)), pytest.raises(UserError) as refused:
        attend(*qkv(dtype), name="self", **given)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("can", "given", "dtype"),
    [
        ({}, {"key_mask": torch.ones(2, 7, dtype=torch.bool), "dropout": 0.1}, torch.float32),
        ({"takes_mask": False, "takes_dropout": False}, {}, torch.float32),
        ({"half_only": True}, {}, torch.bfloat16),
        ({"half_only": True}, {}, torch.float16),
    ],
)
def test_what_a_backend_can_take_reaches_it(monkeypatch, fake, can, given, dtype):
    monkeypatch.setitem(BACKENDS, "fake", replace(fake, **can))
    with attention_settings(AttentionSettings(backend="fake")), pytest.raises(Called):
        attend(*qkv(dtype), name="self", **given)


# The entries that need a package


def stand_in(seen: list, *, returns: Any) -> Any:
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), q, k, v, options))
        return returns

    return flash_attn_func


@pytest.mark.parametrize(
    ("backend", "package", "dropout", "options", "wrapped"),
    [
        ("flash2", "flash_attn", 0.0, {"dropout_p": 0.0}, False),
        ("flash2", "flash_attn", 0.25, {"dropout_p": 0.25}, False),
        ("flash3", "flash_attn_interface", 0.0, {}, False),
        ("flash3", "flash_attn_interface", 0.0, {}, True),
    ],
)
def test_flash_attention_gets_tokens_before_heads_and_what_it_returns_is_handed_on(
    monkeypatch, backend, package, dropout, options, wrapped
):
    q, k, v = qkv(torch.bfloat16)
    out, seen = torch.full((2, 5, 3, 8), 0.5, dtype=torch.bfloat16), []
    returns = (out, torch.zeros(2, 3, 5)) if wrapped else out
    installed(monkeypatch, package, flash_attn_func=stand_in(seen, returns=returns))
    with attention_settings(AttentionSettings(backend=backend)):
        assert attend(q, k, v, name="self", dropout=dropout) is out
    ((*shapes, given_q, given_k, given_v, given_options),) = seen
    assert shapes == [(2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8)]  # batch, tokens, heads, head_dim
    assert given_q is q and given_k is k and given_v is v
    assert given_options == options


@pytest.mark.parametrize(("backend", "mask", "dropout"), [("flash2", True, 0.0), ("flash3", True, 0.0), ("flash3", False, 0.1)])  # fmt: skip
def test_flash_attention_is_not_asked_for_what_it_has_not(monkeypatch, backend, mask, dropout):
    seen: list = []
    for package in ("flash_attn", "flash_attn_interface"):
        installed(monkeypatch, package, flash_attn_func=stand_in(seen, returns=None))
    key_mask = torch.ones(2, 7, dtype=torch.bool) if mask else None
    with attention_settings(AttentionSettings(backend=backend)), pytest.raises(UserError):
        attend(*qkv(torch.bfloat16), name="self", key_mask=key_mask, dropout=dropout)
    assert seen == []


# check_backend


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without flash attention, whatever this one has."""
    find = attention.find_spec
    monkeypatch.setattr(attention, "find_spec", lambda name: None if name.startswith("flash_attn") else find(name))


def test_an_unknown_backend_is_refused_with_those_that_work(nothing_installed):
    with pytest.raises(UserError) as refused:
        check_backend("flash4", training=True)
    assert str(refused.value) == "unknown attention backend 'flash4'; usable here: sdpa"


@pytest.mark.parametrize(("name", "package"), [("flash2", "flash_attn"), ("flash3", "flash_attn_interface")])
@pytest.mark.parametrize("training", [False, True])
def test_a_backend_that_is_not_installed_is_refused_with_the_package_to_install(
    nothing_installed, name, package, training
):
    with pytest.raises(UserError) as refused:
        check_backend(name, training=training)
    assert str(refused.value) == f"attention backend {name!r} needs {package}, not installed; usable here: sdpa"


def test_an_installed_backend_is_accepted_and_listed(monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: ModuleSpec(name, None) if name == "flash_attn" else None)
    check_backend("flash2", training=True)
    check_backend("sdpa", training=True)
    with pytest.raises(UserError, match="usable here: sdpa, flash2$"):
        check_backend("flash3", training=True)


def test_a_backend_without_a_backward_samples_and_does_not_train(monkeypatch, nothing_installed, fake):
    monkeypatch.setitem(BACKENDS, "fake", replace(fake, has_backward=False))
    check_backend("fake", training=False)
    with pytest.raises(UserError) as refused:
        check_backend("fake", training=True)
    assert str(refused.value) == "attention backend 'fake' has no backward and cannot train; usable here: sdpa"
    with pytest.raises(UserError, match="usable here: sdpa, fake$"):
        check_backend("nothing", training=False)


# Settings


def test_settings_hold_inside_their_block_and_are_restored_also_after_an_error():
    outer, inner = AttentionSettings(backend="flash2"), AttentionSettings(keep=True)
    assert settings_in_force() == AttentionSettings()
    with attention_settings(outer):
        with pytest.raises(Called), attention_settings(inner):
            assert settings_in_force() is inner
            raise Called
        assert settings_in_force() is outer
    assert settings_in_force() == AttentionSettings(backend="sdpa", keep=False)


# last_step


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
        return last_step(self.last, self.first(x).sin(), lambda y, x, gate: x + y * gate, x, gate), gate


def gradients(block: Gated, policy: str) -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, 24).reshape(4, 6).requires_grad_()
    settings = AttentionSettings(keep=policy == "attn_only")
    out, _ = run_block(block, (x, torch.tensor(0.5)), policy=policy, settings=settings, name="block")
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
        (partial(matmul, trained=True), "attn_only", 2),  # a gate that is trained with it needs its output
        (more_than_a_matmul, "none", 1),
        (more_than_a_matmul, "attn_only", 2),
    ],
)
def test_a_frozen_last_matmul_and_no_other_layer_is_left_out_of_a_recompute_that_keeps_regions(last, policy, runs):
    plain, block = Gated(last()), Gated(last())
    block.load_state_dict(plain.state_dict())
    expected, found = gradients(plain, "none"), gradients(block, policy)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert block.runs == {"first": 1 if policy == "none" else 2, "last": runs}


def test_outside_a_recompute_that_keeps_regions_a_last_step_is_a_plain_call(monkeypatch):
    from ditkit_core import last_step as module

    monkeypatch.setattr(module, "remat", None)
    layer, h, x = matmul(), torch.randn(4, 6), torch.randn(4, 6)
    assert torch.equal(last_step(layer, h, torch.add, x), layer(h) + x)
    with attention_settings(AttentionSettings(keep=True)), pytest.raises(AttributeError):
        last_step(layer, h, torch.add, x)
