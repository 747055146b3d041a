"""Blocks under torch's compiler: what is compiled is a checkpoint policy with the block inside it, never the block inside a checkpoint.

A compiled block inside a checkpoint hides its attention from it: `attn_only` would be `full`, silently. Here the compiler sees both at once.
It traces the block once, and its partitioner decides what is kept and what is computed again by what the policy marked; nothing of Python runs
in the backward. Random numbers are replayed by the compiler itself, so that a block with dropout needs none of the hooks of the eager policies.

There is one function for each kind of block, policy and device, with a cache of its own: blocks of one kind share graphs, because their parameters are
arguments of these. Kinds of input that need a graph of their own are those that Python can tell apart: a carry that needs a gradient or none, a
mask or none, one sample or several, and sizes, once: from the second on they are symbols. Backwards belong to their forwards.

What a carry has beside tensors does not cross a graph: the compiler would make a graph of its own for every value that it hands back, such as for
the grids of each number of samples. Blocks may read it, and a graph is then of what they read.

Forwards without a backward run eagerly. So do all where the compiler is told to stand aside, as the search for a value that is not finite does.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch_remat as remat
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ditkit_core.engine.ac_policies import AttentionOnly, EagerRunner, Full, Ops, Policy
from ditkit_core.engine.selective_ac import KeptOps, kept_ops
from ditkit_core.errors import UserError
from ditkit_core.nn.attention_backends import MOST_GRAPHS
from ditkit_core.nn.context import AttentionSettings, calls_in_force, traced_settings

KEY = "train.compile"
DEFAULT = "inductor"

_Place = tuple[int, ...]
"""Where a part of a carry is: the index of a field, and if that is a tuple, the index in it, and so on."""
_Function = Callable[[nn.Module, Any, tuple[_Place, ...]], tuple[Any, ...] | None]
"""(block, carry, places) to what stands at these places of the carry that it makes, as a plain tuple: torch 2.11 builds a NamedTuple wrongly
where a graph returns it. None where it was not compiled."""


def backend_of(compile: bool | str) -> str:
    """The compiler's backend that a setting names; empty for none."""
    return (DEFAULT if compile else "") if isinstance(compile, bool) else compile


def check_compiler(backend: str, devices: Collection[str] = ()) -> None:
    """Refuse, before anything runs, a backend of torch's compiler that is unknown or cannot work here.

    Args:
        backend: Its name; empty for none.
        devices: Kinds of device that it is to compile for; none looks at no device.

    Raises:
        UserError: In one line.
    """
    if not backend:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        usable = ", ".join(name for name in ("inductor", "aot_eager", "eager", "cudagraphs") if name in known)
        raise UserError(f"{KEY} = {backend!r} is no backend of torch's compiler; write true, or one of {usable}")
    if backend in ("eager", "cudagraphs"):
        raise UserError(f"{KEY} = {backend!r} {_UNFIT[backend]}; write true, or aot_eager to look for an error")
    if backend != DEFAULT:
        return
    if "cpu" in devices and not any(map(shutil.which, _compilers())):
        raise UserError(
            f"{KEY} needs a C++ compiler for a CPU, and found none; install g++, set CXX, or leave {KEY} out"
        )
    if any(kind != "cpu" for kind in devices) and find_spec("triton") is None:
        raise UserError(f"{KEY} needs triton for a GPU, which is not installed; install it, or leave {KEY} out")


_UNFIT = {
    "eager": "compiles no backward, so that no policy is in force in it",
    "cudagraphs": "replays memory at fixed addresses, where a step's micro-batches would overwrite each other",
}


def _compilers() -> list[str]:
    named = os.environ.get("CXX")
    return [named] if named else ["g++", "clang++", "c++"]


def check_compiled(backend: str, policies: Collection[Policy], *, quantized: bool = False) -> None:
    """Refuse policies that would not be exact, or not in force, in compiled blocks.

    Args:
        backend: The compiler's; empty for none.
        policies: Every policy that a block may have; none for a budget, which may leave any block as it is.
        quantized: Whether the blocks' matrices are.

    Raises:
        UserError: Saying what to write instead.
    """
    for policy in policies or (Policy(),) if backend else ():
        if type(policy) not in _FORMS:
            raise UserError(
                f"train.checkpointing: {policy} has no compiled form; leave {KEY} out, or use full, attn_only or none"
            )
        if quantized and not policy.recomputes:
            raise UserError(
                f"train.checkpointing: {policy} with {KEY} keeps every weight of a quantized base a second time, in model.dtype; use full or "
                f"attn_only for all blocks, or leave {KEY} out"
            )
        if isinstance(policy, Ops) and kept_ops(policy.names).may_draw:
            raise UserError(
                f"train.checkpointing: {policy} names an operation that draws random numbers, which compiled blocks draw in another way; "
                f"name others, or leave {KEY} out"
            )


@dataclass(frozen=True)
class CompiledRunner:
    """Runs the blocks that have a backward compiled, and the others eagerly."""

    eager: EagerRunner
    backend: str
    """The compiler's."""

    def __call__(self, index: int, block: nn.Module, carry: Any, *, policy: Policy, device: torch.device | None) -> Any:
        eager = partial(self.eager, index, policy=policy, device=device)
        if not torch.is_grad_enabled() or device is None:
            return eager(block, carry)
        if (calls := calls_in_force()) is not None and (type(block), policy) not in calls.traced:
            calls.traced.add((type(block), policy))
            check_traced(block, carry, eager)
        attention = self.eager.attention
        after = run_compiled(block, carry, policy=policy, attention=attention, backend=self.backend, device=device)
        return eager(block, carry) if after is None else after


def run_compiled(
    block: nn.Module, carry: Any, *, policy: Policy, attention: str, backend: str, device: torch.device | None = None
) -> Any:
    """Run one block under a policy, compiled; None if torch's compiler was told to stand aside.

    Args:
        block: The block; the carry that it makes is of the kind that it takes, and has the same beside tensors (`check_traced`).
        carry: A NamedTuple. What the block passes on unchanged keeps its identity.
        policy: One that `check_compiled` lets pass.
        attention: The attention backend.
        backend: The compiler's.
        device: Where the block is. Graphs are of one device, so that each device has as many as it may.

    Raises:
        UserError: If torch cannot compile the block, or came to compile it for too many kinds of input.
    """
    settings = AttentionSettings(backend=attention, keep=policy.kept_attention)
    kind: Any = type(block)
    function, places = _compiled(kind, policy, backend, device), tuple(_crossing(carry))
    try:
        with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS), traced_settings(settings):
            after = function(block, carry, places)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise UserError(
            f"{KEY}: {type(block).__name__} under {policy} came in more kinds than the {MOST_GRAPHS} that are compiled, such as numbers of samples; "
            f"give batches fewer sizes (train.batch_size in place of train.batch_tokens), or leave {KEY} out"
        ) from error
    except torch._dynamo.exc.TorchDynamoException as error:
        said = str(error).strip().splitlines()
        raise UserError(
            f"{KEY}: torch could not compile {type(block).__name__} under {policy}: {said[0] if said else type(error).__name__}; "
            f"leave {KEY} out"
        ) from error
    if after is None:
        return None
    return _with_made(carry, dict(zip(places, after, strict=True)))


def _crossing(carry: Any, place: _Place = ()) -> Iterator[_Place]:
    """Places in a carry of what may be a tensor."""
    if isinstance(carry, tuple):
        for index, part in enumerate(carry):
            yield from _crossing(part, (*place, index))
    elif carry is None or any(isinstance(x, Tensor) for x in tree_leaves(carry)):
        yield place


def _with_made(carry: Any, made: Mapping[_Place, Any], place: _Place = ()) -> Any:
    """A carry with other parts at these places."""
    if place in made:
        return made[place]
    if not isinstance(carry, tuple):
        return carry
    parts = [_with_made(part, made, (*place, index)) for index, part in enumerate(carry)]
    return tuple(parts) if type(carry) is tuple else type(carry)(*parts)


def _at(carry: Any, place: _Place) -> Any:
    for index in place:
        carry = carry[index]
    return carry


@cache
def _compiled(kind: Any, policy: Policy, backend: str, device: torch.device | None) -> _Function:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and issubclass(kind, fsdp.FSDPModule):
        raise UserError(
            f"{KEY}: {kind.__name__} is spread over ranks, and gathering its weights cannot be compiled; leave {KEY} out of the Engine"
        )
    # The compiler's cache hangs on the code object, so that each kind of block, policy and device gets one of its own.
    made = _FORMS[type(policy)](policy)
    own = FunctionType(
        made.__code__.replace(co_name=f"{kind.__name__}_{policy.kind}"), made.__globals__, made.__name__, None, made.__closure__
    )  # fmt: skip
    compiled: _Function = torch.compile(own, backend=backend, fullgraph=True)
    return compiled


def _inside(block: nn.Module, carry: Any, places: tuple[_Place, ...]) -> tuple[Any, ...]:
    after = block(carry)
    if type(after) is not type(carry):
        raise UserError(f"{KEY}: {type(block).__name__} makes another kind of carry than it takes")
    return tuple(_at(after, place) for place in places)


def _keeping_all(policy: Policy) -> Any:
    def run(block: nn.Module, carry: Any, places: tuple[_Place, ...]) -> tuple[Any, ...] | None:
        return _inside(block, carry, places) if torch.compiler.is_compiling() else None

    return run


def _keeping_inputs(policy: Policy) -> Any:
    def run(block: nn.Module, carry: Any, places: tuple[_Place, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            return None
        after: tuple[Any, ...] = checkpoint(lambda: _inside(block, carry, places), use_reentrant=False)
        return after

    return run


def _keeping_regions(policy: Policy) -> Any:
    def run(block: nn.Module, carry: Any, places: tuple[_Place, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            return None
        after: tuple[Any, ...] = remat.checkpoint(region_name="block")(lambda: _inside(block, carry, places))()
        return after

    return run


def _keeping_operations(policy: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, partial(_decided, kept_ops(policy.names)))

    def run(block: nn.Module, carry: Any, places: tuple[_Place, ...]) -> tuple[Any, ...] | None:
        if not torch.compiler.is_compiling():
            return None
        after: tuple[Any, ...] = checkpoint(
            lambda: _inside(block, carry, places), use_reentrant=False, context_fn=contexts
        )
        return after

    return run


def _decided(ops: KeptOps, context: Any, op: Any, *args: Any, **given: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if ops.keeps(op, args, given) else CheckpointPolicy.PREFER_RECOMPUTE


_FORMS: dict[type[Policy], Callable[[Policy], Any]] = {
    Policy: _keeping_all,
    Full: _keeping_inputs,
    AttentionOnly: _keeping_regions,
    Ops: _keeping_operations,
}
"""How a policy is written for the compiler, by its kind."""


def _static(part: Any) -> list[Any]:
    """What a part of a carry has besides tensors."""
    return [leaf for leaf in tree_leaves(part) if leaf is not None and not isinstance(leaf, Tensor)]


def check_traced(block: nn.Module, carry: Any, run: Callable[[nn.Module, Any], Any]) -> None:
    """Run a block's forward on tensors without memory, eagerly, for what its policy finds there: the compiler's trace tells nobody.

    Args:
        block: The block.
        carry: What it takes.
        run: Runs it under its policy, with attention calls counted.

    Raises:
        UserError: If the carry that it makes has something else beside tensors than the one that it takes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch_remat compares addresses
        after = run(block, tree_map_only(Tensor, mode.from_tensor, carry))
    names = [name for name, part in carry._asdict().items() if _static(getattr(after, name, None)) != _static(part)]
    if names:
        raise UserError(
            f"{KEY}: {type(block).__name__} changes {', '.join(names)} of its carry, and of a carry only tensors come out of a compiled block; "
            f"leave {KEY} out"
        )
