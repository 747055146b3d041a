"""Finds the first value that is not finite: reruns a micro-batch and checks the result of every
operation.

Only for a step that failed, because each check waits for the device. Module hooks and a dispatch
mode locate the operation. They also see recomputation and autograd's threads, so it works with
streamed, split and checkpointed models.
"""

import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ditkit_core.adapters.inject import canonical_name
from ditkit_core.models.protocol import StagedModel
from ditkit_core.training.tensor_stats import magnitudes

_MAKES_INFINITIES = (
    *("empty", "new_empty", "resize", "full", "new_full", "fill", "masked_fill"),
    *("scalar_tensor", "where"),
)
"""Operations that may return infinities on purpose: masks of -inf, and memory that is filled
later."""


_EXCHANGES = ("fsdp.", "c10d.", "_c10d_functional.")
"""Namespaces of operations between ranks: their results may have memory that is not filled yet."""


def find_first_nonfinite(
    model: StagedModel,
    loss_of: Callable[[], Tensor],
    *,
    on_any_rank: Callable[[bool], bool] = bool,
    broken_weights: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """Run a micro-batch's forward, and its backward if the loss is finite, to find the first
    non-finite value.

    Args:
        model: The staged model; gradients are freed as they arrive.
        loss_of: Runs its forward and returns a scalar loss.
        on_any_rank: Whether something is true on any of the ranks that run their forwards together.
        broken_weights: Names of the weights that are not finite, perhaps in rows of other ranks;
            None looks at them.

    Returns:
        For JSON: `pass` (forward, backward, or recompute), `stage` (inputs, embedding, block 3,
        head, loss), `module` by name, `operation`, `operations_before`, their number, and
        `weights`, names of the stage's weights that are not finite themselves. None if all is
        finite.
    """
    probe = _Probe(model, broken_weights)
    with ExitStack() as stack:
        # A dispatch mode does not see operations inside compiled code.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(probe.watching())
        loss = loss_of()
        # Ranks that exchange tokens or weights in their forwards do so in their backwards, too.
        if not on_any_rank(probe.finding is not None or not bool(loss.isfinite())):
            probe.is_backward = True
            loss.backward()
    return probe.finding


class _Thread(threading.local):
    """The position of one thread: autograd has a thread for each device."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, str]] = []
        """Stage and name of the modules that it is in, outermost first."""
        self.backward_module = ("loss", "")
        """The module that its backward entered last."""
        self.is_looking = False
        """Whether the operations are our own checks, which are not checked themselves."""


class _Probe(TorchDispatchMode):
    """Checks the result of every operation until one is not finite.

    Negative infinities in an operation's inputs are masks and may pass through. An infinity is
    attributed to the operation that made it from finite numbers, to the layer whose weights contain
    it, or to the sample that contains it.
    """

    supports_higher_order_operators = True
    """Higher-order operators reach the mode too: attention can be one. They call functions and have
    no overloads."""

    def __init__(self, model: StagedModel, broken_weights: Collection[str] | None = None) -> None:
        super().__init__()
        self._known, self._num_operations = broken_weights, 0
        self.finding: dict[str, Any] | None = None
        self.is_backward = False
        self._model = model
        self._names = {id(module): _layer_name(name) for name, module in model.named_modules()}
        stages = {
            "embedding": model.embed,
            **{f"block {i}": block for i, block in enumerate(model.blocks())},
        }
        self._tops = {id(stage): label for label, stage in {**stages, "head": model.head}.items()}
        self._broken_weights: list[str] = []
        self._local = _Thread()
        self._after_head = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block operations, modules and gradients are checked."""
        with ExitStack() as stack:
            hooks = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]
            hooks += [
                parameter.register_post_accumulate_grad_hook(_drop)
                for parameter in self._model.parameters()
                if parameter.requires_grad
            ]
            for hook in hooks:
                stack.callback(hook.remove)
            stack.enter_context(self)
            yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        if (name := self._names.get(id(module))) is None:
            return
        outer = self._local.stack[-1][0] if self._local.stack else "inputs"
        stage = self._tops.get(id(module), outer)
        self._local.stack.append((stage, name))
        # Checked only now: the weights of a streamed block are not on the device before.
        if id(module) in self._tops and self.finding is None:
            self._broken_weights = [
                canonical_name(one)
                for one, weight in module.named_parameters(prefix=name)
                if (not self._is_finite(weight) if self._known is None else one in self._known)
            ]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._names or not self._local.stack:
            return
        position = self._local.stack.pop()
        self._after_head |= module is self._model.head
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point():
                leaf.register_hook(partial(self._passed, position))

    def _passed(self, position: tuple[str, str], gradient: Tensor) -> None:
        """The backward enters a module."""
        self._local.backward_module = position
        if self.finding is None and not self._is_finite(gradient):
            self._note("the gradient that arrives")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = str(getattr(func, "_overloadpacket", func))
        name = operation.rpartition(".")[2]
        self._num_operations += not self._local.is_looking
        if (
            self.finding is not None
            or self._local.is_looking
            or getattr(func, "is_view", False)
            or name.startswith(_MAKES_INFINITIES)
            or operation.startswith(_EXCHANGES)
            # sums of gradients over ranks
            or any(kind.__module__.startswith("torch.distributed.") for kind in types)
        ):
            return func(*args, **(kwargs or {}))
        inputs = tree_leaves((args, kwargs))
        in_place = isinstance(func, OpOverload) and func._schema.is_mutable
        # before an in-place operation overwrites them
        masked = in_place and self._has_masks(inputs)
        out = func(*args, **(kwargs or {}))
        # The other results of attention have padding that is never written.
        outputs = tree_leaves(out)[: 1 if "attention" in name else None]
        broken = [
            leaf for leaf in outputs if isinstance(leaf, Tensor) and not self._is_finite(leaf)
        ]
        if broken and not (
            all(map(self._is_masked, broken))
            and (masked or not in_place and self._has_masks(inputs))
        ):
            self._note(operation)
        return out

    def _has_masks(self, inputs: Sequence[Any]) -> bool:
        """Whether an operation has negative infinities in its inputs that come neither from a
        sample nor from its layer's weights."""
        if not self._local.stack:
            return self.is_backward and any(
                self._is_masked(leaf, rest_is_finite=False) for leaf in inputs
            )
        broken_layers = {_layer_name(weight.rpartition(".")[0]) for weight in self._broken_weights}
        return self._local.stack[-1][1] not in broken_layers and any(
            self._is_masked(leaf, rest_is_finite=False) for leaf in inputs
        )

    def _is_masked(self, leaf: Any, rest_is_finite: bool = True) -> bool:
        """Whether a value contains negative infinities; with `rest_is_finite`, only if everything
        else in it is finite."""
        if not isinstance(leaf, Tensor) or self._is_finite(leaf):
            return False
        self._local.is_looking = True
        hidden = leaf == -torch.inf
        masked = bool((hidden | leaf.isfinite()).all() if rest_is_finite else hidden.any())
        self._local.is_looking = False
        return masked

    def _is_finite(self, tensor: Tensor) -> bool:
        if (
            not tensor.is_floating_point()
            or not tensor.numel()
            or tensor.is_meta
            or tensor.itemsize == 1
        ):
            return True
        self._local.is_looking = True
        finite = not int(magnitudes(tensor)[1])
        self._local.is_looking = False
        return finite

    def _note(self, operation: str) -> None:
        stack = self._local.stack
        if stack:
            stage, module = stack[-1]
        elif self.is_backward:
            stage, module = self._local.backward_module
        else:
            stage, module = "loss" if self._after_head else "inputs", ""
        passes = "forward" if not self.is_backward else "recompute" if stack else "backward"
        self.finding = {
            "pass": passes,
            "stage": stage,
            "module": module,
            "operation": operation,
            "operations_before": self._num_operations,
            "weights": [] if passes == "backward" else self._broken_weights[:10],
        }


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _layer_name(name: str) -> str:
    """A module's name; for modules that peft adds inside of a layer, the layer's name."""
    return re.split(r"\.(?:base_layer|lora_\w+|lokr_\w+|hada_\w+)(?:\.|$)", name, maxsplit=1)[0]


def describe_nonfinite(finding: dict[str, Any]) -> str:
    """The result of `find_first_nonfinite` as one phrase."""
    at = f" at {finding['module']}" if finding["module"] else ""
    line = f"first in {finding['stage']}{at}, {finding['operation']} in the {finding['pass']}"
    return (
        f"{line}, where {', '.join(finding['weights'])} is not finite itself"
        if finding["weights"]
        else line
    )
