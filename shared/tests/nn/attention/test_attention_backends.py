"""The table of attention backends: what each entry hands on and refuses, what is usable here, and
the help text made from it."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_tensors import fake_kernel, qkv
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from ditkit_core.commands.cli import run
from ditkit_core.errors import UserError
from ditkit_core.nn.attention import backends as attention_backends
from ditkit_core.nn.attention.attention import attend
from ditkit_core.nn.attention.backends import BACKENDS, check_backend
from ditkit_core.nn.attention.support import support_matrix
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.testing.toy import TOY


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A stand-in for a package that is not there."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None, origin="made by a test")
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


# The entries that need a package or a GPU: what they hand on, to stand-ins


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry takes tensors on the CPU, where its stand-in runs."""
    for name, backend in list(BACKENDS.items()):
        monkeypatch.setitem(BACKENDS, name, replace(backend, devices=()))


def stand_in(seen: list, *, returns: Any) -> Any:
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), q, k, v, options))
        return returns

    return flash_attn_func


LIBRARIES = {
    "flash2": ("flash_attn", "flash_attn_func"),
    "flash3": ("flash_attn_interface", "flash_attn_func"),
    "flash4": ("flash_attn.cute", "flash_attn_func"),
    "sage": ("sageattention", "sageattn"),
}


def install(monkeypatch: pytest.MonkeyPatch, backend: str, function: Any) -> None:
    """A backend's library with this function in it."""
    module, name = LIBRARIES[backend]
    if "." in module:
        installed(monkeypatch, module.split(".")[0], __path__=[])
    installed(monkeypatch, module, **{name: function})


@pytest.mark.parametrize(
    ("backend", "dropout", "options", "wrapped"),
    [
        ("flash2", 0.0, {"dropout_p": 0.0, "causal": False}, False),
        ("flash2", 0.25, {"dropout_p": 0.25, "causal": False}, False),
        ("flash3", 0.0, {"causal": False}, False),
        ("flash3", 0.0, {"causal": False}, True),
        ("flash4", 0.0, {"causal": False}, False),
        ("flash4", 0.0, {"causal": False}, True),
        ("sage", 0.0, {"tensor_layout": "NHD", "is_causal": False}, False),
    ],
)
def test_a_library_gets_tokens_before_heads_and_what_it_returns_is_handed_on(
    monkeypatch, on_any_device, backend, dropout, options, wrapped
):
    q, k, v = qkv(torch.bfloat16)
    out, seen = torch.full((2, 5, 3, 8), 0.5, dtype=torch.bfloat16), []
    install(
        monkeypatch,
        backend,
        stand_in(seen, returns=(out, torch.zeros(2, 3, 5)) if wrapped else out),
    )
    with block_settings(BlockSettings(backend=backend)):
        assert attend(q, k, v, name="self", dropout=dropout) is out
    ((*shapes, given_q, given_k, given_v, given_options),) = seen
    assert shapes == [(2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8)]  # batch, tokens, heads, head_dim
    assert given_q is q and given_k is k and given_v is v
    assert given_options == options


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_library_is_called_with_the_device_of_its_tensors_current(monkeypatch, backend):
    """flash-attn 4 launches on the current device's stream, and sageattention leaves another device
    current."""
    entered = []

    @contextmanager
    def current(device):
        entered.append(device)
        yield
        entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", current)
    seen = []

    def kernel(q, k, v, **options):
        seen.append(entered[-1])
        return q

    install(monkeypatch, backend, kernel)
    with FakeTensorMode(), block_settings(BlockSettings(backend=backend)):
        attend(
            *(torch.empty(2, 5, 3, 8, dtype=torch.bfloat16, device="cuda:1") for _ in range(3)),
            name="self",
        )
    assert seen == [torch.device("cuda", 1)] and entered == [torch.device("cuda", 1), None]


@pytest.mark.parametrize(
    "backend", [name for name, b in BACKENDS.items() if not (b.takes_mask and b.takes_dropout)]
)
def test_a_kernel_is_not_asked_for_what_it_has_not(monkeypatch, on_any_device, backend):
    entry = replace(BACKENDS[backend], kernel=fake_kernel)
    monkeypatch.setitem(BACKENDS, backend, entry)
    asked = [] if entry.takes_mask else [{"padding_mask": torch.ones(2, 7, dtype=torch.bool)}]
    asked += [] if entry.takes_dropout else [{"dropout": 0.1}]
    with block_settings(BlockSettings(backend=backend)):
        for given in asked:
            with pytest.raises(UserError, match=f"{backend}.*use sdpa"):
                attend(*qkv(torch.bfloat16), name="self", **given)


@pytest.mark.parametrize(
    ("backend", "which"),
    [
        ("sdpa_flash", SDPBackend.FLASH_ATTENTION), ("sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
        ("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION), ("sdpa_math", SDPBackend.MATH),
    ],
)  # fmt: skip
def test_sdpa_is_held_to_one_kernel_and_let_go_again(monkeypatch, on_any_device, backend, which):
    pinned: list = []

    def seen(chosen):
        pinned.append(chosen)
        return sdpa_kernel(chosen)

    monkeypatch.setattr(attention_backends, "sdpa_kernel", seen)
    before = enabled_kernels()
    with block_settings(BlockSettings(backend=backend)):
        if which is SDPBackend.MATH:
            assert torch.allclose(
                attend(*qkv(), name="self"), attention_backends._sdpa(*qkv(), None, 0.0), atol=1e-6
            )
        elif which is SDPBackend.FLASH_ATTENTION:
            attend(*qkv(torch.bfloat16), name="self")
        else:
            with pytest.raises(
                UserError, match=f"{backend!r} cannot run q .* on this cpu; use sdpa"
            ):
                attend(*qkv(torch.bfloat16), name="self")
    assert pinned == [which]
    assert enabled_kernels() == before


def enabled_kernels() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled()
    )  # fmt: skip


def test_devices_that_recompute_at_once_do_not_undo_each_others_choice_of_a_kernel(on_any_device):
    """torch holds the choice for the whole process; without a lock the last to leave restores what
    another had chosen."""
    before = enabled_kernels()

    def work(name: str) -> None:
        with block_settings(BlockSettings(backend=name)):
            for _ in range(200):
                attend(*qkv(torch.bfloat16), name="self")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, ["sdpa_math", "sdpa_flash"] * 2))
    assert enabled_kernels() == before


@pytest.mark.parametrize("masked", [False, True])
def test_varlen_gets_the_keys_that_may_be_seen_packed(monkeypatch, on_any_device, masked):
    def packed(q, k, v, bounds_q, bounds_k, max_q, max_k, *, window_size):
        assert window_size == (-1, -1)
        assert (bounds_q.dtype, bounds_k.dtype) == (torch.int32, torch.int32) and (
            max_q,
            max_k,
        ) == (5, 7)
        parts = zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True)
        return torch.cat(
            [
                attention_backends._sdpa(q[None, a:b], k[None, c:d], v[None, c:d], None, 0.0)[0]
                for a, b, c, d in parts
            ]
        )

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", packed)
    monkeypatch.setitem(BACKENDS, "varlen", replace(BACKENDS["varlen"], half_only=False))
    q, k, v = (t.requires_grad_() for t in qkv(torch.float64))
    mask = (
        torch.tensor([[True] * 7, [False, True, True, True, True, False, False]])
        if masked
        else None
    )
    out, expected = None, attend(q, k, v, name="self", padding_mask=mask)
    with block_settings(BlockSettings(backend="varlen")):
        out = attend(q, k, v, name="self", padding_mask=mask)
    assert torch.allclose(out, expected, rtol=0, atol=1e-14)
    gradients = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)]
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("masked", [False, True])
def test_flex_sees_no_masked_key(monkeypatch, on_any_device, masked):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention_backends, "_compiled_flex", lambda: flex_attention)
    q, k, v = (t.contiguous() for t in qkv())
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3]) if masked else None
    expected = attend(q, k, v, name="self", padding_mask=mask)
    with torch.no_grad(), block_settings(BlockSettings(backend="flex")):
        assert torch.allclose(
            attend(q, k, v, name="self", padding_mask=mask), expected, rtol=0, atol=1e-6
        )


def test_flex_never_runs_eagerly_behind_the_last_graph_that_it_may_make(monkeypatch, on_any_device):
    """Eager it would make every score; torch's own limit, 8, is fewer than the kinds of input."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(attention_backends, "MOST_GRAPHS", 1)
    kernel = attention_backends._compiled_flex.__wrapped__()
    monkeypatch.setattr(attention_backends, "_compiled_flex", lambda: kernel)
    torch._dynamo.reset()
    try:
        with torch.no_grad(), block_settings(BlockSettings(backend="flex")):
            q, k, v = (t.contiguous() for t in qkv())
            attend(q, k, v, name="self")
            assert torch._dynamo.config.recompile_limit == 8
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                attend(q.double(), k.double(), v.double(), name="self")
            monkeypatch.setattr(attention_backends, "MOST_GRAPHS", 2)
            attend(q.double(), k.double(), v.double(), name="self")
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_library_is_told_that_a_call_is_causal(monkeypatch, on_any_device, backend):
    seen: list = []
    q, _, _ = qkv(torch.bfloat16)
    install(monkeypatch, backend, stand_in(seen, returns=q))
    with block_settings(BlockSettings(backend=backend)):
        attend(q, q, q, name="text", causal=True)
    ((*_, options),) = seen
    assert options["is_causal" if backend == "sage" else "causal"] is True


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["sdpa", "sdpa_math", "exact", "flex", "varlen"])
def test_a_causal_query_sees_the_keys_up_to_its_place(monkeypatch, on_any_device, backend):
    """Results and gradients, against a softmax over a triangle; `exact` in several spans. flex has
    no backward on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    def packed(q, k, v, bounds_q, bounds_k, max_q, max_k, *, window_size):
        assert torch.equal(bounds_q, bounds_k) and window_size == (-1, 0)
        shape = (len(bounds_q) - 1, max_q, *q.shape[1:])
        parts = (x.view(shape) for x in (q, k, v))
        return attention_backends._sdpa(*parts, None, 0.0, causal=True).flatten(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", packed)
    monkeypatch.setattr(attention_backends, "_compiled_flex", lambda: flex_attention)
    monkeypatch.setattr("ditkit_core.nn.attention.backends.SCORES_AT_ONCE", 2 * 3 * 7 * 2)
    monkeypatch.setitem(BACKENDS, "varlen", replace(BACKENDS["varlen"], half_only=False))
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, 3, 8, generator=random, dtype=torch.float64) for _ in range(3))
    trains = backend != "flex"
    leaves = [x.requires_grad_(trains) for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    triangle = torch.ones(7, 7, dtype=torch.bool).tril()
    weights = scores.masked_fill(~triangle, -float("inf")).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    with block_settings(BlockSettings(backend=backend)):
        out = attend(q, k, v, name="text", causal=True)
    pairs = [(out, expected)]
    if trains:
        pairs += zip(
            *(torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)), strict=True
        )
    for actual, right in pairs:
        assert torch.allclose(actual, right, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", ["sdpa", "sdpa_math", "exact", "flex"])
@pytest.mark.parametrize(
    "blocks",
    [
        [((2, 5),), ((2, 5),)],
        [((0, 3), (3, 5), (6, 7)), ()],
        [((1, 2),), ((3, 7),)],
    ],
    ids=["alike", "some that touch", "others"],
)
def test_tokens_of_a_block_see_each_other_and_all_before_them(
    monkeypatch, on_any_device, backend, blocks
):
    """Results and gradients, against a softmax over a mask of each sample."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention_backends, "_compiled_flex", lambda: flex_attention)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 7, 3, 8, generator=random, dtype=torch.float64) for _ in range(3))
    trains = backend != "flex"
    leaves = [x.requires_grad_(trains) for x in (q, k, v)]
    seen = torch.ones(2, 7, 7, dtype=torch.bool).tril()
    for mask, stretches in zip(seen, blocks, strict=True):
        for start, end in stretches:
            mask[start:end, start:end] = True
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    weights = scores.masked_fill(~seen[:, None], -float("inf")).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    with block_settings(BlockSettings(backend=backend)):
        out = attend(q, k, v, name="text", causal=True, blocks=blocks)
    pairs = [(out, expected)]
    if trains:
        pairs += zip(
            *(torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected)), strict=True
        )
    for actual, right in pairs:
        assert torch.allclose(actual, right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_a_library_attends_in_blocks_without_a_mask(monkeypatch, on_any_device, backend):
    """All tokens causally, then each block to the keys up to its end."""
    seen: list = []
    q, _, _ = qkv(torch.bfloat16)
    install(monkeypatch, backend, lambda q, *_, **options: seen.append((q, *_, options)) or q)
    with block_settings(BlockSettings(backend=backend)):
        out = attend(q, q, q, name="text", causal=True, blocks=[((1, 3),)] * 2)
    assert torch.equal(out, q)
    calls = [(x.shape[1], y.shape[1]) for x, y, *_ in seen]
    causal = [options["is_causal" if backend == "sage" else "causal"] for *_, options in seen]
    assert calls == [(5, 5), (2, 3)] and causal == [True, False]


@pytest.mark.parametrize(
    "backend", [name for name, entry in BACKENDS.items() if entry.has_backward]
)
@pytest.mark.parametrize("masked", [False, True])
# torch's reasons why a GPU has no such kernel, before it raises
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_on_a_gpu_every_installed_backend_agrees_with_the_math_kernel_in_fp32(backend, masked, gpu):
    """bf16 rounds to 8 bits: 2**-7 of the largest value, in results and gradients."""
    entry = BACKENDS[backend]
    if not attention_backends.is_installed(entry.module) or (masked and not entry.takes_mask):
        pytest.skip("not installed, or takes no mask")
    if entry.devices and not gpu.is_real:
        pytest.skip("has no kernel for a stand-in")
    random = torch.Generator().manual_seed(0)
    shape = (2, 160, 4, 64)
    # `exact` is for fp64: it rounds scores and weights, too, to the dtype that it is given.
    dtype = torch.float32 if backend == "exact" else torch.bfloat16
    given = [torch.randn(shape, generator=random).bfloat16().to(dtype) for _ in range(3)]
    mask = torch.arange(160)[None] < torch.tensor([[160], [96]]) if masked else None
    truth = [t.float().requires_grad_() for t in given]
    with block_settings(BlockSettings(backend="sdpa_math")):
        expected = attend(*truth, name="self", padding_mask=mask)
    expected_gradients = torch.autograd.grad(expected.square().mean(), truth)
    there = [t.to(gpu.device).requires_grad_() for t in given]
    try:
        with block_settings(BlockSettings(backend=backend)):
            out = attend(
                *there, name="self", padding_mask=None if mask is None else mask.to(gpu.device)
            )
    except UserError as refused:
        pytest.skip(str(refused))  # this GPU has no such kernel
    gradients = torch.autograd.grad(out.float().square().mean(), there)
    for found, right in zip([out, *gradients], [expected, *expected_gradients], strict=True):
        found, right = found.detach().cpu().float(), right.detach()
        assert float((found - right).abs().max()) <= 2**-7 * float(right.abs().max())


# The fault of cuDNN before 9.26 on Hopper


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without libraries of attention, whatever this one has."""
    monkeypatch.setattr(attention_backends, "find_spec", lambda name: None)


TORCH_ON_GPUS = ", ".join(name for name, backend in BACKENDS.items() if backend.module is None)
TORCH_ON_A_CPU = ", ".join(name for name, backend in BACKENDS.items() if not backend.devices)


def test_an_unknown_backend_is_refused_with_those_that_work(nothing_installed):
    with pytest.raises(UserError) as refused:
        check_backend("flash5", training=True, devices=["cpu"])
    assert (
        str(refused.value) == "unknown attention backend 'flash5'; usable here: " + TORCH_ON_A_CPU
    )
    with pytest.raises(UserError, match=f"usable here: {TORCH_ON_GPUS}$"):
        check_backend("flash5", training=True, devices=["cuda"])


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.module])
def test_a_backend_that_is_not_installed_is_refused_with_the_package_to_install(
    nothing_installed, name
):
    with pytest.raises(UserError) as refused:
        check_backend(name, training=False)
    package = LIBRARIES[name][0]
    assert (
        str(refused.value)
        == f"attention backend {name!r} needs {package}, not installed; usable here: {TORCH_ON_GPUS}"
    )


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if backend.devices])
def test_a_backend_of_gpus_is_refused_on_a_cpu_before_the_first_step(monkeypatch, name):
    """flex among them: torch says in its backward, not before, that there is none on a CPU."""
    monkeypatch.setattr(attention_backends, "is_installed", lambda module: True)
    monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], has_backward=True))
    check_backend(name, training=True, devices=["cuda"])
    check_backend(name, training=True)
    with pytest.raises(UserError) as refused:
        check_backend(name, training=True, devices=["cuda", "cpu"])
    assert (
        str(refused.value)
        == f"attention backend {name!r} runs on cuda only, not on cpu; usable here: {TORCH_ON_A_CPU}"
    )


def test_what_is_installed_is_accepted_and_listed(monkeypatch):
    libraries = {"flash_attn": ModuleSpec("flash_attn", None, origin="here")}
    monkeypatch.setattr(attention_backends, "find_spec", libraries.get)
    check_backend("flash2", training=True)
    with pytest.raises(UserError, match="usable here: .*, varlen, flash2$"):
        check_backend("flash3", training=True)
    # flash-attn 4 alone: a folder of that name without the package
    libraries |= {
        "flash_attn": ModuleSpec("flash_attn", None),
        "flash_attn.cute": ModuleSpec("", None, origin="here"),
    }
    with pytest.raises(
        UserError, match="'flash2' needs flash_attn, not installed; .*, varlen, flash4$"
    ):
        check_backend("flash2", training=True)


def test_a_part_of_a_package_that_is_not_there_is_not_installed():
    assert not attention_backends.is_installed("no_such_package.part")


def test_a_backend_without_a_backward_samples_and_does_not_train(monkeypatch):
    libraries = {"sageattention": ModuleSpec("sageattention", None, origin="here")}
    monkeypatch.setattr(attention_backends, "find_spec", libraries.get)
    check_backend("sage", training=False)
    with pytest.raises(UserError) as refused:
        check_backend("sage", training=True)
    assert (
        str(refused.value)
        == f"attention backend 'sage' has no backward and cannot train; usable here: {TORCH_ON_GPUS}"
    )
    with pytest.raises(UserError, match=f"usable here: {TORCH_ON_GPUS}, sage$"):
        check_backend("nothing", training=False)


def test_the_help_of_train_prints_what_each_backend_can_do(capsys):
    assert run(TOY, "train", ["--help", "train"]) == 0
    text = capsys.readouterr().out
    assert support_matrix() in text
    rows = {line.split()[0]: line.split()[1:] for line in support_matrix().splitlines()[2:]}
    assert list(rows) == list(BACKENDS)
    assert rows["sdpa"] == ["yes", "yes", "yes", "any", "any", "any", "torch", "yes"]
    assert rows["sage"][:7] == ["no", "no", "no", "bf16", "fp16", "cuda", "8.0,"]
    assert rows["sage"][-3:] == ["12.1", "sageattention", "no"]
    assert rows["flash3"][6] == "8.0-9.0"
    assert rows["varlen"][:3] == ["yes", "yes", "no"]
    assert run(TOY, "export", ["--help"]) == 0
    assert support_matrix() not in capsys.readouterr().out
