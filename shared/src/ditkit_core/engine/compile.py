"""Blocks under torch's compiler: a checkpointing policy with the block inside it is compiled, never a block inside a checkpoint.

A compiled block inside a checkpoint hides its attention from it: `attn_only` would silently be `full`. Here the compiler sees both at once.
It traces the block once. Its partitioner decides what is kept and what is recomputed, by the policy's marks; no Python runs in the backward.
The compiler replays random numbers itself, so a block with dropout needs none of the hooks of the eager policies.

There is one function for each kind of block, policy and device, with a cache of its own. Blocks of one kind share graphs, because their
parameters are arguments of the graph. A kind of input gets its own graph where Python can tell it apart: a carry with or without
gradients, with or without a mask, one sample or several. Sizes get one more graph: from the second size on they are symbols. Each graph
has its own backward.

Only the tensors of a carry cross a graph: for every other value that a graph returns, such as the grids of each number of samples, the
compiler would make another graph. Blocks may read such values; a graph is then specialised on what they read.

Forwards without a backward run eagerly. So do all forwards while the compiler is disabled, as in the search for a non-finite value.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch_remat as remat
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from ditkit_core.engine.ac_policies import AttentionOnly, Full, Policy
from ditkit_core.engine.run_block import EagerRunner
from ditkit_core.errors import UserError, argument
from ditkit_core.nn.attention.backends import BACKENDS, MOST_GRAPHS
from ditkit_core.nn.context import BlockSettings, calls_in_force, traced_settings

KEY = "train.compile"
DEFAULT = "inductor"

_Path = tuple[int, ...]
"""Path to a part of a carry: the index of a field, then, if that is a tuple, the index in it, and so on."""
_Function = Callable[[nn.Module, Any, tuple[_Path, ...]], tuple[Any, ...] | None]
"""(block, carry, paths) to the parts of the output carry at these paths, as a plain tuple: torch 2.11 builds a NamedTuple wrongly where a
graph returns it. None where it was not compiled."""


def backend_of(compile: bool | str) -> str:
    """The name of the compiler's backend for a setting; empty for none."""
    return (DEFAULT if compile else "") if isinstance(compile, bool) else compile


def check_compiler(backend: str, devices: Collection[str] = ()) -> None:
    """Refuse, before anything runs, a backend of torch's compiler that cannot work on these types of device."""
    if not backend:
        return
    if backend != DEFAULT:
        backends = torch.compiler.list_backends(exclude_tags=())  # imports all of them, which takes seconds
        if backend not in backends:
            usable = ", ".join(name for name in ("inductor", "aot_eager", "eager", "cudagraphs") if name in backends)
            raise UserError(
                f"{argument(KEY)} = {backend!r} is not a backend of torch's compiler; write true, or one of {usable}"
            )
        if backend in ("eager", "cudagraphs"):
            raise UserError(
                f"{argument(KEY)} = {backend!r} {_UNFIT[backend]}; write true, or aot_eager to look for an error"
            )
        return
    # Inductor writes C++ for CPUs and Triton for GPUs. A missing compiler would show only in the first
    # step, as a long trace.
    named = os.environ.get("CXX")  # replaces inductor's search
    if "cpu" in devices and not any(map(shutil.which, [named] if named else ["g++", "clang++", "c++"])):
        raise UserError(
            f"{argument(KEY)} needs a C++ compiler for a CPU, and found none; install g++, set CXX, or leave {argument(KEY)} out"
        )
    if any(kind != "cpu" for kind in devices) and find_spec("triton") is None:
        raise UserError(
            f"{argument(KEY)} needs triton for a GPU, which is not installed; install it, or leave {argument(KEY)} out"
        )


_UNFIT = {
    "eager": "compiles no backward, so it would ignore every checkpointing policy",
    "cudagraphs": "uses memory at fixed addresses, so a step's micro-batches would overwrite each other",
}


def check_compiled(
    backend: str, policies: Collection[Policy], *, attention: str = "sdpa", quantized: bool = False
) -> None:
    """Refuse what cannot be compiled, and policies that would not be exact, or have no effect, in compiled blocks.

    Args:
        backend: The compiler's backend; empty for none.
        policies: Every policy that a block may have; empty for a budget, which may keep everything in any block.
        attention: The attention backend.
        quantized: Whether the blocks' matrices are quantized.
    """
    if not backend:
        return
    if attention in BACKENDS and not BACKENDS[attention].compiles:
        others = ", ".join(
            name for name, other_backend in BACKENDS.items() if other_backend.compiles and other_backend.has_backward
        )
        raise UserError(
            f"{argument(KEY)}: torch's compiler cannot trace attention backend {attention!r}, whose kernels are no operations of torch; set "
            f"{argument('train.attention')} to one of {others}, or leave {argument(KEY)} out"
        )
    for policy in policies or (Policy(),):
        if type(policy) not in _FORMS:
            raise UserError(
                f"{argument('train.checkpointing')}: {policy} has no compiled form; leave {argument(KEY)} out, or use full, attn_only or none"
            )
        # The compiler converts a quantized weight once in the forward and, without a checkpoint, saves the
        # result for the backward.
        if quantized and not policy.recomputes:
            raise UserError(
                f"{argument('train.checkpointing')}: {policy} with {argument(KEY)} keeps every weight of a quantized base a second time, in {argument('model.dtype')}; use full or "
                f"attn_only for all blocks, or leave {argument(KEY)} out"
            )


@dataclass(frozen=True)
class CompiledRunner:
    """Runs blocks that have a backward compiled, and all others eagerly."""

    eager: EagerRunner
    backend: str

    def __call__(self, index: int, block: nn.Module, carry: Any, *, policy: Policy, device: torch.device | None) -> Any:
        eager = partial(self.eager, index, policy=policy, device=device)
        if not torch.is_grad_enabled() or device is None:
            return eager(block, carry)
        # The first step counts attention calls, which happen in Python: a compiled block makes none, so it
        # is run once without memory.
        if (calls := calls_in_force()) is not None and (type(block), policy) not in calls.traced:
            calls.traced.add((type(block), policy))
            plain = EagerRunner(replace(self.eager.settings, backend="sdpa"))
            check_traced(block, carry, partial(plain, index, policy=policy, device=device))
        attention = self.eager.settings.backend
        after = run_compiled(block, carry, policy=policy, attention=attention, backend=self.backend, device=device)
        return eager(block, carry) if after is None else after


def run_compiled(
    block: nn.Module, carry: Any, *, policy: Policy, attention: str, backend: str, device: torch.device | None = None
) -> Any:
    """Run one block under a policy, compiled.

    Args:
        block: Its output carry has the type of its input, and the same values other than tensors (`check_traced`).
        carry: A NamedTuple. Tensors that the block passes on unchanged keep their identity.
        policy: A policy that `check_compiled` accepts.
        device: The block's device. Each graph is of one device, so that the limit on graphs counts per device.

    Returns:
        The output carry; None while torch's compiler is disabled.
    """
    settings = BlockSettings(backend=attention, keep=policy.kept_attention)
    kind: Any = type(block)
    function, paths = _compiled(kind, policy, backend, device), tuple(_crossing(carry))
    try:
        # Beyond its limit torch would run the block eagerly, without its policy; `fullgraph` makes that an error. Backwards are compiled with
        # their forwards: torch would do it in the first backward, in several threads at once where a step uses several devices.
        limit = torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS)
        with limit, functorch_config.patch(force_non_lazy_backward_lowering=True), traced_settings(settings):
            after = function(block, carry, paths)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise UserError(
            f"{argument(KEY)}: {type(block).__name__} under {policy} had more kinds of input than the {MOST_GRAPHS} that are compiled, such as numbers of samples; "
            f"give batches fewer sizes ({argument('train.batch_size')} instead of {argument('train.batch_tokens')}), or leave {argument(KEY)} out"
        ) from error
    except torch._dynamo.exc.TorchDynamoException as error:
        said = str(error).strip().splitlines()
        raise UserError(
            f"{argument(KEY)}: torch could not compile {type(block).__name__} under {policy}: {said[0] if said else type(error).__name__}; "
            f"leave {argument(KEY)} out"
        ) from error
    if after is None:
        return None
    return _with_parts(carry, dict(zip(paths, after, strict=True)))


def _crossing(carry: Any, path: _Path = ()) -> Iterator[_Path]:
    """Paths in a carry to where a tensor may be. None counts: a block may make a tensor there."""
    if isinstance(carry, tuple):
        for index, part in enumerate(carry):
            yield from _crossing(part, (*path, index))
    elif carry is None or any(isinstance(x, Tensor) for x in tree_leaves(carry)):
        yield path


def _with_parts(carry: Any, new_parts: Mapping[_Path, Any], path: _Path = ()) -> Any:
    """A carry with other parts at these paths; all else is as in the input."""
    if path in new_parts:
        return new_parts[path]
    if not isinstance(carry, tuple):
        return carry
    parts = [_with_parts(part, new_parts, (*path, index)) for index, part in enumerate(carry)]
    return tuple(parts) if type(carry) is tuple else type(carry)(*parts)


def _at(carry: Any, path: _Path) -> Any:
    for index in path:
        carry = carry[index]
    return carry


@cache
def _compiled(kind: Any, policy: Policy, backend: str, device: torch.device | None) -> _Function:
    # Not imported for this: a model can be sharded only if somebody has imported FSDP2.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and issubclass(kind, fsdp.FSDPModule):
        raise UserError(
            f"{argument(KEY)}: {kind.__name__} is sharded over ranks, and gathering its weights cannot be compiled; call BlockEngine without compile"
        )
    # The compiler's cache belongs to the code object. A copy of it for each kind of block, policy and device gives each a cache of its own.
    traced = _FORMS[type(policy)](policy)
    code = traced.__code__.replace(co_name=f"{kind.__name__}_{policy.kind}")
    function = FunctionType(code, traced.__globals__, traced.__name__, None, traced.__closure__)
    compiled: _Function = torch.compile(function, backend=backend, fullgraph=True)
    return compiled


def _inside(block: nn.Module, carry: Any, paths: tuple[_Path, ...]) -> tuple[Any, ...]:
    after = block(carry)
    if type(after) is not type(carry):
        raise UserError(
            f"{argument(KEY)}: {type(block).__name__} returns another type of carry than it takes; leave {argument(KEY)} out"
        )
    return tuple(_at(after, path) for path in paths)


def _form(keeping: Callable[[Callable[[], Any]], Any]) -> _Function:
    """The function that the compiler traces, with a checkpoint around the block."""

    def run(block: nn.Module, carry: Any, paths: tuple[_Path, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            return None  # the compiler was disabled, and the caller runs the block eagerly instead
        after: tuple[Any, ...] = keeping(lambda: _inside(block, carry, paths))
        return after

    return run


_FORMS: dict[type[Policy], Callable[[Policy], _Function]] = {
    Policy: lambda policy: _form(lambda body: body()),
    Full: lambda policy: _form(lambda body: checkpoint(body, use_reentrant=False)),
    AttentionOnly: lambda policy: _form(lambda body: remat.checkpoint(region_name="block")(body)()),
}
"""The function that the compiler traces, by type of policy."""


def _static(part: Any) -> list[Any]:
    """The values of a part of a carry that are not tensors."""
    return [leaf for leaf in tree_leaves(part) if leaf is not None and not isinstance(leaf, Tensor)]


def check_traced(block: nn.Module, carry: Any, run: Callable[[nn.Module, Any], Any]) -> None:
    """Run a block's forward on tensors without memory, to count its attention calls: a compiled one reports none.

    Args:
        run: Runs the block with an attention backend that takes such tensors, whatever the compiled block uses.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch_remat compares addresses
        after = run(block, tree_map_only(Tensor, mode.from_tensor, carry))
    # Compared for the first block of a kind only: values other than tensors are the input's from then
    # on.
    names = [name for name, part in carry._asdict().items() if _static(getattr(after, name, None)) != _static(part)]
    if names:
        raise UserError(
            f"{argument(KEY)}: {type(block).__name__} changes {', '.join(names)} of its carry, but a compiled block returns only the tensors of a carry; "
            f"leave {argument(KEY)} out"
        )
