"""Steps of compiled blocks for tests, which run them in separate processes, because type checks cannot be traced."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from ditkit_core.engine import engine as activation_checkpoint
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.world import Items

_FORWARDS = ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_safe_softmax")


class Emptying:
    """Hooks that free a block's frozen weights between their uses, as `swap_blocks` does: the storage stays and its memory is freed."""

    def __init__(self) -> None:
        self._there: list[tuple[Tensor, Tensor]] = []
        self._gone: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.refilled = 0

    def pre_forward(self, index: int, block: nn.Module) -> None:
        """Fill this block's weights, and free those of the block before."""
        self._empty()
        frozen = (parameter for parameter in block.parameters() if not parameter.requires_grad)
        self._there = self._gone.pop(index, []) or [(parameter, parameter.detach().clone()) for parameter in frozen]
        self._fill(self._there)
        self._index = index

    def post_forward(self, index: int, block: nn.Module, carry: Any) -> None:
        """Nothing: the next block's hook frees it."""

    def pre_backward(self, index: int, block: nn.Module) -> None:
        """As `pre_forward`."""
        self.pre_forward(index, block)

    def restore(self) -> None:
        """Fill all weights."""
        self._empty()
        for held in list(self._gone):
            self._fill(self._gone.pop(held))

    def _fill(self, weights: list[tuple[Tensor, Tensor]]) -> None:
        for tensor, host in weights:
            if not tensor.untyped_storage().nbytes():
                with torch.no_grad(), _unsafe_preserve_version_counter(tensor):
                    tensor.untyped_storage().resize_(host.nbytes)
                    tensor.copy_(host)
                self.refilled += 1

    def _empty(self) -> None:
        if self._there:
            self._gone[self._index], self._there = self._there, []
            for tensor, _ in self._gone[self._index]:
                with _unsafe_preserve_version_counter(tensor):
                    tensor.untyped_storage().resize_(0)


@contextmanager
def divided(model: Any, devices: Sequence[torch.device]) -> Iterator[Counter[torch.device]]:
    """Inside the block, the engine treats the stages of a model as if they were on these devices; all tensors are on the CPU.

    The compiler cannot trace a `PretendTensor`. So tensors are plain CPU tensors, and each move is a copy.

    Args:
        model: The model.
        devices: Devices of the embedding, each block and the head.

    Yields:
        Number of moves of a carry to each device.
    """
    of, moves = activation_checkpoint.device_of, Counter[torch.device]()
    where = {id(x): y for x, y in zip([model.embed, *model.blocks(), model.head], devices, strict=True)}

    def moved(carry: Any, device: torch.device) -> Any:
        moves[device] += 1
        return tree_map_only(Tensor, torch.clone, carry)

    there, sent = activation_checkpoint.device_of, activation_checkpoint.move_carry
    setattr(activation_checkpoint, "device_of", lambda stage: of(stage) and where.get(id(stage), of(stage)))  # noqa: B010
    setattr(activation_checkpoint, "move_carry", moved)  # noqa: B010
    try:
        yield moves
    finally:
        setattr(activation_checkpoint, "device_of", there)  # noqa: B010
        setattr(activation_checkpoint, "move_carry", sent)  # noqa: B010


def numbers(spec: ModelSpec, model: Any, items: Items, engine: BlockEngine) -> list[Tensor]:
    """Outputs, and gradients of inputs and parameters, from the same random state every time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    latents = [item["latents"].clone().requires_grad_() for item in items]
    outputs = list(
        model(spec.training.make_inputs(latents, torch.linspace(0.3, 0.8, len(items)), items, 1.0), engine=engine)
    )
    sum((output.float().square().mean() for output in outputs), torch.zeros(())).backward()
    gradients = [tensor.grad for tensor in (*latents, *model.parameters())]
    return [*(output.detach() for output in outputs), *(gradient for gradient in gradients if gradient is not None)]


def attention_forwards(work: Callable[[], object]) -> int:
    """Number of attention forwards in `work`; counted by the profiler, because no dispatch mode sees into compiled code."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    ran = Counter(event.name for event in profile.events())
    return sum(ran[name] for name in _FORWARDS)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12))
        for a, b in zip(found, expected, strict=True)
    )


def compare(
    spec: ModelSpec, model: Any, items: Items, policies: Sequence[str], *, backend: str, attention: str = "sdpa"
) -> dict[str, dict[str, Any]]:
    """Results of compiled steps under each policy, compared with those under the first policy.

    Returns:
        By policy: `equal` if bitwise identical to the first; the largest difference `from_eager`, relative; `forwards` of attention; `graphs`.
    """
    eager, first, found = numbers(spec, model, items, BlockEngine(backend=attention)), None, {}
    for policy in policies:
        counters.clear()
        run = BlockEngine(policy=policy, compile=backend, backend=attention)
        under = numbers(spec, model, items, run)
        graphs = counters["stats"]["unique_graphs"]
        first = first or under
        found[policy] = {
            "equal": all(map(torch.equal, under, first)),
            "from_first": difference(under, first),
            "from_eager": difference(under, eager),
            "forwards": attention_forwards(lambda run=run: numbers(spec, model, items, run)),  # type: ignore[misc]
            "graphs": graphs,
        }
    return found
