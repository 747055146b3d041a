"""Steps of compiled blocks for tests, which run them in separate processes, because type checks cannot be traced."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map_only

from ditkit_core.engine import engine as activation_checkpoint
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.world import Items, largest

_FORWARDS = ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_safe_softmax")


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

    def pretended(stage: Any) -> torch.device | None:
        return of(stage) and where.get(id(stage), of(stage))

    with patch.multiple(activation_checkpoint, device_of=pretended, move_carry=moved):
        yield moves


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


def difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    return largest(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-12))
        for a, b in zip(actual, expected, strict=True)
    )


def compare(
    spec: ModelSpec, model: Any, items: Items, policies: Sequence[str], *, backend: str, attention: str = "sdpa"
) -> dict[str, dict[str, Any]]:
    """Results of compiled steps under each policy, compared with those under the first policy.

    Returns:
        By policy: `equal` if bitwise identical to the first; the largest difference `from_eager`, relative; `forwards` of attention; `graphs`.
    """
    eager, first, results = numbers(spec, model, items, BlockEngine(backend=attention)), None, {}
    for policy in policies:
        counters.clear()
        run = BlockEngine(policy=policy, compile=backend, backend=attention)
        under = numbers(spec, model, items, run)
        graphs = counters["stats"]["unique_graphs"]
        first = first or under
        results[policy] = {
            "equal": all(map(torch.equal, under, first)),
            "from_first": difference(under, first),
            "from_eager": difference(under, eager),
            "forwards": attention_forwards(lambda run=run: numbers(spec, model, items, run)),  # type: ignore[misc]
            "graphs": graphs,
        }
    return results
