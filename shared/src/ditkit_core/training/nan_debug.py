"""Where a number first went wrong: a micro-batch run once more, every operation's result looked at.

Only for a step that failed: each look waits for the device. Places are found by module hooks and a dispatch mode, so that it works
whatever streams, divides or checkpoints the model; recomputes and autograd's threads pass through both.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
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
    "empty",
    "new_empty",
    "full",
    "new_full",
    "fill",
    "masked_fill",
    "scalar_tensor",
    "where",
    "resize",
)
"""Operations whose result is what somebody wrote there, or nobody: masks of -inf, memory to be filled."""


def find_first_nonfinite(model: StagedModel, loss_of: Callable[[], Tensor]) -> dict[str, Any] | None:
    """Run a micro-batch's forward, and its backward if the loss is finite, and say where the first value that is not finite came from.

    Args:
        model: The staged model; gradients are thrown away as they come.
        loss_of: Its forward, to a number.

    Returns:
        For JSON: `pass` (forward, backward, or recompute), `stage` (inputs, embedding, block 3, head, loss), `module` by name, `operation`,
        and `weights`, names of the stage's weights that are not finite themselves. None if everything is finite.
    """
    probe = _Probe(model)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # inside of compiled code no operation is seen
        stack.enter_context(probe.watching())
        loss = loss_of()
        if probe.found is None and bool(loss.isfinite()):
            probe.is_backward = True
            loss.backward()
    return probe.found


class _Thread(threading.local):
    """Where a thread is: each device's backward has one."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, str]] = []
        """Stage and name of the modules that it is in, outermost first."""
        self.behind = ("loss", "")
        """The module that its backward entered last."""
        self.is_looking = False
        """Whether it is our own operation, in a hook, that is seen."""


class _Probe(TorchDispatchMode):
    """Looks at the result of every operation until one is not finite.

    Infinities below 0 that went in are masks, and may come out: they are blamed on the operation that made them of numbers alone, on the
    layer whose weights they are, and on the sample that has them.
    """

    supports_higher_order_operators = True
    """So that torch hands those over too: they call functions, have no overloads, and attention can be one."""

    def __init__(self, model: StagedModel) -> None:
        super().__init__()
        self.found: dict[str, Any] | None = None
        self.is_backward = False
        self._model = model
        self._names = {id(module): _layer_name(name) for name, module in model.named_modules()}
        stages = {"embedding": model.embed, **{f"block {i}": block for i, block in enumerate(model.blocks())}}
        self._tops = {id(stage): label for label, stage in {**stages, "head": model.head}.items()}
        self._broken_weights: list[str] = []
        self._local = _Thread()
        self._after_head = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block operations, modules and gradients are looked at."""
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
        if id(module) in self._tops and self.found is None:  # of a streamed block, they are here now and not before
            own = module.named_parameters(prefix=name)
            self._broken_weights = [canonical_name(one) for one, weight in own if not self._is_finite(weight)]

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._names or not self._local.stack:
            return
        place = self._local.stack.pop()
        self._after_head |= module is self._model.head
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point():
                leaf.register_hook(partial(self._passed, place))

    def _passed(self, place: tuple[str, str], gradient: Tensor) -> None:
        """The backward enters a module."""
        self._local.behind = place
        if self.found is None and not self._is_finite(gradient):
            self._note("the gradient that arrives")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = str(getattr(func, "_overloadpacket", func))
        name = operation.rpartition(".")[2]
        if (
            self.found is not None
            or self._local.is_looking
            or getattr(func, "is_view", False)
            or name.startswith(_MAKES_INFINITIES)
        ):
            return func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        in_place = isinstance(func, OpOverload) and func._schema.is_mutable
        masked = in_place and self._has_masks(given)  # before they are written over
        out = func(*args, **(kwargs or {}))
        made = tree_leaves(out)[: 1 if "attention" in name else None]  # the others are sums in memory that is padded
        broken = [leaf for leaf in made if isinstance(leaf, Tensor) and not self._is_finite(leaf)]
        if broken and not (all(map(self._is_masked, broken)) and (masked or not in_place and self._has_masks(given))):
            self._note(operation)
        return out

    def _has_masks(self, given: Sequence[Any]) -> bool:
        """Whether an operation here is given infinities below 0 that are neither a sample's nor the weights of its layer."""
        if not self._local.stack:
            return self.is_backward and any(self._is_masked(leaf, whole=False) for leaf in given)
        own = {_layer_name(weight.rpartition(".")[0]) for weight in self._broken_weights}
        return self._local.stack[-1][1] not in own and any(self._is_masked(leaf, whole=False) for leaf in given)

    def _is_masked(self, leaf: Any, whole: bool = True) -> bool:
        """Whether a value has infinities below 0, and if it is looked at as a whole, nothing else that is not finite."""
        if not isinstance(leaf, Tensor) or self._is_finite(leaf):
            return False
        self._local.is_looking = True
        hidden = leaf == -torch.inf
        masked = bool((hidden | leaf.isfinite()).all() if whole else hidden.any())
        self._local.is_looking = False
        return masked

    def _is_finite(self, tensor: Tensor) -> bool:
        if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta or tensor.itemsize == 1:
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
            stage, module = self._local.behind
        else:
            stage, module = "loss" if self._after_head else "inputs", ""
        passes = "forward" if not self.is_backward else "recompute" if stack else "backward"
        self.found = {
            "pass": passes,
            "stage": stage,
            "module": module,
            "operation": operation,
            "weights": [] if passes == "backward" else self._broken_weights[:10],
        }


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _layer_name(name: str) -> str:
    """A module's name; of what peft keeps inside of a layer, the layer's."""
    return re.split(r"\.(?:base_layer|lora_\w+)(?:\.|$)", name, maxsplit=1)[0]


def describe_nonfinite(found: dict[str, Any]) -> str:
    """What `find_first_nonfinite` found, as one phrase."""
    at = f" at {found['module']}" if found["module"] else ""
    line = f"first in {found['stage']}{at}, {found['operation']} in the {found['pass']}"
    return f"{line}, where {', '.join(found['weights'])} is not finite itself" if found["weights"] else line
