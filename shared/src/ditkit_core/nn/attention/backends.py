"""The attention backends: the kernel of each.

Kernels are called by the public names of their libraries: `torch.nn.functional`,
`torch.nn.attention`, `flash_attn` (2), `flash_attn_interface` (3), `flash_attn.cute` (4),
`sageattention`. A library is imported when its kernel first runs.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ditkit_core.errors import UserError
from ditkit_core.nn.attention.support import SUPPORT, Support
from ditkit_core.nn.context import device_current

Kernel = Callable[..., Tensor]
"""(q, k, v [batch, tokens, heads, head_dim], padding mask [batch, keys] or None, dropout) to the
result, shaped like q. With `causal=True` a query attends only to the keys up to its place; there is
then no mask, and as many keys as queries."""

MOST_GRAPHS = 64
"""Graphs that torch's compiler may make of flex attention, one for each kind of input; more is an
error."""

_KERNEL_LOCK = threading.Lock()
"""torch's choice of a kernel belongs to the process, not to a thread: two devices that recompute at
once would restore each other's."""


SCORES_AT_ONCE = 2**26
"""Number of scores in memory at once: half a GiB of fp64 each for scores, exponentials and
gradients."""


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    mask = None if padding_mask is None else padding_mask[:, None, None, :]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
    )
    return out.transpose(1, 2)


_WITHOUT_FAULT, _HOPPER = 92600, (9, 0)


def _cudnn_of(device: torch.device) -> tuple[int, tuple[int, int]]:
    """The version of cuDNN and the compute capability of a GPU; zeros elsewhere."""
    if device.type != "cuda":
        return 0, (0, 0)
    return torch.backends.cudnn.version() or 0, torch.cuda.get_device_capability(device)


def _safe_for_cudnn(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    """The kernel, with keys that the mask hides behind the others where cuDNN would make gradients
    that are not finite.

    Before 9.26, its backward on Hopper behaves as if there were 64 more keys with scores of zero
    where 64 are in the last 128: if all scores of a query are below about -89, the weights of those
    overflow in fp32, and the gradient of the query is NaN. Measured with 9.19 on an H100: finite up
    to -90, NaN from -100 on; finite with any other number of keys, and with hidden keys up to a
    multiple of 128, which take 4 % more time for 20,288 keys. Without a mask it happens as well,
    but one costs 44 % of the time of attention, and another kernel 68 %, for scores that no model
    with normalised queries and keys has. A step with such a gradient stops the run.
    """
    if (
        padding_mask is None
        or k.shape[1] % 128 != 64
        or q.dtype not in (torch.float16, torch.bfloat16)
    ):
        return kernel(q, k, v, padding_mask, dropout, causal)
    version, capability = _cudnn_of(q.device)
    if version >= _WITHOUT_FAULT or capability != _HOPPER:
        return kernel(q, k, v, padding_mask, dropout)
    k, v = (F.pad(t, (0, 0, 0, 0, 0, 64)) for t in (k, v))
    return kernel(q, k, v, F.pad(padding_mask, (0, 64), value=False), dropout)


def _pinned(
    name: str,
    which: SDPBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    try:
        with _KERNEL_LOCK, sdpa_kernel(which):
            return _sdpa(q, k, v, padding_mask, dropout, causal)
    except RuntimeError as error:
        # By its words: torch raises a plain RuntimeError for this and for everything else, such as
        # a lack of memory.
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        raise UserError(
            f"attention backend {name!r} cannot run q {tuple(q.shape)} {q.dtype} with k "
            f"{tuple(k.shape)} on this {q.device.type}; use sdpa"
        ) from error


@cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # In eager mode it would compute the full matrix of scores. Without `fullgraph` it silently does
    # so beyond the limit of graphs.
    return torch.compile(flex_attention, fullgraph=True)


def _hide_later(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A module's function: a new one for each call would be another graph."""
    return torch.where(query >= key, score, -float("inf"))


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    # A score modification costs no memory; a block mask would be built from a full matrix [queries,
    # keys].
    hide: Callable[..., Tensor] | None = None
    if causal:
        hide = _hide_later
    elif padding_mask is not None:
        hide = lambda score, b, head, query, key: torch.where(
            padding_mask[b, key], score, -float("inf")
        )
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS):
        out: Tensor = _compiled_flex()(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), score_mod=hide
        )
    return out.transpose(1, 2)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # All samples are packed into one sequence; the bounds say where each begins.
    batch, num_queries, num_keys = *q.shape[:2], k.shape[1]

    def bounds(length: int) -> Tensor:
        return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)

    keys, values, key_bounds = k.flatten(0, 1), v.flatten(0, 1), bounds(num_keys)
    if padding_mask is not None:
        # nonzero waits for the device, because the number of keys decides a shape
        key_indices = padding_mask.flatten().nonzero().squeeze(1)
        keys, values = keys.index_select(0, key_indices), values.index_select(0, key_indices)
        key_bounds = F.pad(padding_mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    # Queries of padding are computed like the rest, as in other backends; nobody reads their rows.
    window = (-1, 0 if causal else -1)
    out = varlen_attn(
        q.flatten(0, 1),
        keys,
        values,
        bounds(num_queries),
        key_bounds,
        num_queries,
        num_keys,
        window_size=window,
    )
    assert isinstance(out, Tensor)
    return out.view(batch, num_queries, *out.shape[1:])


def _first(out: Any) -> Tensor:
    """The attention result. Some releases of flash-attn return it alone, others in a tuple with the
    log-sum-exp."""
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _flash2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    from flash_attn import flash_attn_func

    return _first(flash_attn_func(q, k, v, dropout_p=dropout, causal=causal))


def _flash3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    from flash_attn_interface import flash_attn_func

    return _first(flash_attn_func(q, k, v, causal=causal))


def _flash4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    from flash_attn.cute import flash_attn_func

    return _first(flash_attn_func(q, k, v, causal=causal))


def _sage(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    from sageattention import sageattn

    # Our layout [batch, tokens, heads, head_dim] is NHD there; its default has heads first.
    out: Tensor = sageattn(q, k, v, tensor_layout="NHD", is_causal=causal)
    return out


def exact_attention(
    q: Float[Tensor, "batch queries heads head_dim"],
    k: Float[Tensor, "batch keys heads head_dim"],
    v: Float[Tensor, "batch keys heads head_dim"],
    padding_mask: Bool[Tensor, "batch keys"] | None,
    dropout: float,
    causal: bool = False,
) -> Float[Tensor, "batch queries heads head_dim"]:
    """softmax(q kᵀ / √head_dim) v in plain products over a few queries at a time, in the dtype of
    q, k and v, on any device, without the full matrix of scores.

    A GPU's fast kernels take no fp64, and torch's own kernel for it stores all scores at once, the
    square of the number of tokens. Here scores are computed for some queries, used and freed; the
    backward computes them again. It is slow: other backends are compared with it.

    `padding_mask` is True where a key may be attended to; None if all may. `dropout` is always 0:
    all kernels have one signature. With `causal`, a query attends to the keys up to its place.
    """
    out: Tensor = _Exact.apply(q, k, v, padding_mask, causal)
    return out


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, causal: bool
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, padding_mask)
        ctx.causal = causal
        # Written span by span: the results of all spans and their concatenation would be in memory
        # twice.
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        for span in _exact_spans(q, k):
            part = _exact_weights(q, span, keys, padding_mask, causal) @ values
            out[:, span] = part.transpose(1, 2)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, padding_mask = ctx.saved_tensors
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        # Every span of queries adds to the gradients of all keys and values.
        d_k, d_v = torch.zeros_like(keys), torch.zeros_like(values)
        for span in _exact_spans(q, k):
            weights = _exact_weights(q, span, keys, padding_mask, ctx.causal)
            d_out = gradient[:, span].transpose(1, 2)
            d_v += weights.transpose(-2, -1) @ d_out
            d_weights = d_out @ values.transpose(-2, -1)
            # The softmax's backward: dS = W ∘ (dW - Σ dW ∘ W), per query.
            inner = (d_weights * weights).sum(-1, keepdim=True)
            d_scores = (d_weights - inner).mul_(weights).mul_(_exact_scale(q))
            d_q[:, span] = (d_scores @ keys).transpose(1, 2)
            d_k += d_scores.transpose(-2, -1) @ q[:, span].transpose(1, 2)
        return d_q, d_k.transpose(1, 2), d_v.transpose(1, 2), None, None


def _exact_weights(
    q: Tensor, span: slice, keys: Tensor, padding_mask: Tensor | None, causal: bool
) -> Tensor:
    """Attention weights [batch, heads, queries, keys] of the queries in a span."""
    scores = q[:, span].transpose(1, 2) @ keys.transpose(-2, -1) * _exact_scale(q)
    if causal:
        positions = torch.arange(keys.shape[2], device=q.device)
        scores = scores.masked_fill(positions > positions[span, None], -float("inf"))
    if padding_mask is not None:
        scores = scores.masked_fill(~padding_mask[:, None, None, :], -float("inf"))
    return scores.softmax(-1)


def _exact_scale(q: Tensor) -> float:
    return float(q.shape[-1] ** -0.5)


def _exact_spans(q: Tensor, k: Tensor) -> Iterator[slice]:
    batch, num_queries, heads, _ = q.shape
    at_once = max(1, SCORES_AT_ONCE // (batch * heads * k.shape[1]))
    for start in range(0, num_queries, at_once):
        yield slice(start, start + at_once)


@dataclass(frozen=True, kw_only=True)
class Backend(Support):
    """A kernel for attention, and what it supports."""

    kernel: Kernel


def _on_its_device(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding_mask: Tensor | None,
    dropout: float,
    causal: bool = False,
) -> Tensor:
    with device_current(q):
        return kernel(q, k, v, padding_mask, dropout, causal)


_KERNELS: dict[str, Kernel] = {
    "sdpa": partial(_safe_for_cudnn, _sdpa),
    "sdpa_flash": partial(_pinned, "sdpa_flash", SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": partial(_pinned, "sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_cudnn": partial(
        _safe_for_cudnn, partial(_pinned, "sdpa_cudnn", SDPBackend.CUDNN_ATTENTION)
    ),
    "sdpa_math": partial(_pinned, "sdpa_math", SDPBackend.MATH),
    "exact": exact_attention,
    "flex": _flex,
    "varlen": _varlen,
    "flash2": partial(_on_its_device, _flash2),
    "flash3": partial(_on_its_device, _flash3),
    "flash4": partial(_on_its_device, _flash4),
    "sage": partial(_on_its_device, _sage),
}
BACKENDS = {
    name: Backend(kernel=_KERNELS[name], **vars(support)) for name, support in SUPPORT.items()
}
"""By the names for `train.attention`."""


def is_installed(module: str | None) -> bool:
    """Whether a backend's module can be imported.

    Installed alone, flash-attn 4 leaves a folder `flash_attn` that is not a package. Version 2 is
    then not installed.
    """
    if module is None:
        return True
    try:
        spec = find_spec(module)
    except ImportError:  # the package that contains it is missing
        return False
    return spec is not None and spec.origin is not None


def check_backend(name: str, *, training: bool, devices: Collection[str] = ()) -> None:
    """Refuse, before the first step, a backend that is unknown, not installed, or does not run on
    these types of device.

    One without a backward is refused for training. Without `devices`, no device is checked.
    """
    if name in BACKENDS and (reason := _obstacle(name, training, devices)) is None:
        return
    # Only what would run here: a message that suggests a library which is not installed helps
    # nobody.
    usable = ", ".join(other for other in BACKENDS if _obstacle(other, training, devices) is None)
    if name not in BACKENDS:
        raise UserError(f"unknown attention backend {name!r}; usable here: {usable}")
    raise UserError(f"attention backend {name!r} {reason}; usable here: {usable}")


def _obstacle(name: str, training: bool, devices: Collection[str]) -> str | None:
    backend = BACKENDS[name]
    if training and not backend.has_backward:
        return "has no backward and cannot train"
    if not is_installed(backend.module):
        return f"needs {backend.module}, not installed"
    if backend.devices and (others := [kind for kind in devices if kind not in backend.devices]):
        return f"runs on {' and '.join(backend.devices)} only, not on {others[0]}"
    return None
