"""The operations that `ops(...)` can name: sets of them by a word, or single ones of torch.

A schedule is read before torch is imported, which takes seconds; only the name of a single operation needs torch.
"""

import difflib
import functools
import inspect
from typing import Any

_ATTENTION = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._flash_attention_forward.default",
    "aten._efficient_attention_forward.default",
    "aten._cudnn_attention_forward.default",
    "torch_attn._varlen_attn.default",
    "flash_attn._flash_attn_forward.default",
    "flash_attn._flash_attn_varlen_forward.default",
    "flash_attn_3.fwd.default",
    "flash_attn_3._flash_attn_forward.default",  # wraps the one above since 2025
)
# A functional collective returns at once and `wait_tensor` returns its result, so both are needed to run neither again.
_COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "wait_tensor",
)

SETS: dict[str, frozenset[str]] = {
    # `mm.dtype` is `mm` with a wider result.
    "matmul": frozenset(
        f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_int_mm")
    )
    | {"aten.mm.dtype"},
    "attention": frozenset(_ATTENTION),
    "collectives": frozenset(f"_c10d_functional.{name}.default" for name in _COLLECTIVES),
}
"""Sets of operations, by their word in a schedule. They contain forward operations only. An operation that writes into its argument, such
as a collective in place or `mm.out`, cannot be kept and runs again."""


@functools.cache
def kept_results_reach_hooks() -> bool:
    """Whether this torch passes the results that it keeps by name to saved-tensor hooks, by which they are offloaded."""
    from torch.utils.checkpoint import checkpoint

    return "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


def check_names(names: tuple[str, ...]) -> None:
    """Refuse names that are neither a set nor an operation whose result can be kept.

    Raises:
        ValueError: With what could be written instead.
    """
    if not names:
        raise ValueError(f"ops takes names: {', '.join(SETS)}, or operations such as aten.mm.default")
    for name in names:
        if name not in SETS:
            _check_operation(name)


def _check_operation(name: str) -> None:
    import torch  # here: most schedules name no operation of torch, and importing it takes seconds

    # torch.ops loads names on access: a wrong namespace shows only where something is looked up in it.
    entry: Any = torch.ops
    for part in name.split("."):
        try:
            entry = getattr(entry, part)
        except (AttributeError, RuntimeError):
            raise ValueError(f"ops knows no {name!r}; {_meant(name)}") from None
    match entry:
        # A packet has a default overload and others; the selective checkpoint sees overloads.
        case torch._ops.OpOverloadPacket():
            overloads = {overload: getattr(entry, overload) for overload in entry.overloads()}
            candidates = [f"{name}.{overload}" for overload, op in overloads.items() if not op._schema.is_mutable]
            choice = " or ".join(candidates[:3]) or "another"
            raise ValueError(f"{name!r} is several operations and matches none; write {choice}")
        case torch._ops.OpOverload():
            pass
        case _:
            raise ValueError(f"ops knows no {name!r}; {_meant(name)}")
    if entry._schema.is_mutable:
        raise ValueError(f"{name!r} writes into one of its arguments, so its result cannot be kept")


def _meant(name: str) -> str:
    import torch

    namespace = name.split(".")[0]
    names = [n.replace("::", ".") for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{namespace}::")]
    full = [n if n.count(".") > 1 else f"{n}.default" for n in names]
    near = difflib.get_close_matches(name, [*SETS, *full], n=1)
    return f"did you mean {near[0]}?" if near else f"choose one of {', '.join(SETS)}, or write one as aten.mm.default"
