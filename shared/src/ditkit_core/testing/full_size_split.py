"""A model split over devices at full size, without memory: transfers, placement, and each device's
peak."""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import inject
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.placement import Placement, place_blocks
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import unused_layers
from ditkit_core.models.spec import ModelSpec, build_on_meta
from ditkit_core.nn.context import as_on
from ditkit_core.planner.memory import Budget
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.planner.partition import choose_split_points, weights_profile
from ditkit_core.planner.reduced_model import materialise
from ditkit_core.testing.observer import Observer
from ditkit_core.training.config import EMAConfig, FlowConfig
from ditkit_core.training.optim.clipping import Clipping, total_norm
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, accumulate_gradients, update

DEVICES = tuple(torch.device("cpu", index) for index in range(4))
"""Under fake tensors devices that refuse to mix, and none of them the host."""

STATE_OF_ADAMW = 2
"""Tensors as large as a parameter, besides a number that counts its steps."""


class Crossings(Observer):
    """Counts copies between devices, and their bytes, by (from, to) and by whether the backward was
    running."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = Counter[tuple[torch.device, torch.device]]()
        self.backward = Counter[tuple[torch.device, torch.device]]()
        self.forward_bytes = Counter[tuple[torch.device, torch.device]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].device != out.device:
            way = args[0].device, out.device
            if torch._C._current_graph_task_id() >= 0:
                self.backward[way] += 1
            else:
                self.forward[way] += 1
                self.forward_bytes[way] += out.nbytes
        elif func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            raise AssertionError(f"a copy in place from {args[1].device} to {args[0].device}")
        return out


@dataclass(frozen=True)
class Divided:
    """An adapted model on fake devices, after optimizer steps."""

    model: Any
    placement: Placement
    trained: TrainState
    crossings: Crossings
    """Of forward and backward of the last step."""
    ledger: MemoryTracker
    """Its peak is the last step's."""
    carried: list[Counter[str]]
    """At each boundary, of the carry: `tensors`, `gradients` (those that take part in the
    backward), `bytes`."""

    def check(self) -> None:
        """Check the devices of tensors against the placement, and the transfers against the
        carries."""
        placement, live = self.placement, self.ledger.live
        device_of = placement.device_of(self.model)
        devices = list(dict.fromkeys([placement.embed, *placement.blocks, placement.head]))
        # Everything of a parameter is where the parameter is, and that where its stage is.
        for name, parameter in self.model.named_parameters():
            assert parameter.device == device_of(name), name
        state = self.trained.optimizer.state()[0]
        unused = tuple(f"{layer}." for layer in unused_layers(self.model))
        for name, parameter in self.trained.parameters.items():
            if name.startswith(unused):
                continue
            assert parameter.grad is not None and parameter.grad.device == parameter.device, name
            assert self.trained.average.values[name].device == parameter.device, name
            moments = [state[f"{name}|{kind}"] for kind in ("exp_avg", "exp_avg_sq")]
            assert all(tensor.device == parameter.device for tensor in moments), name
        # To the byte.
        numbers = Counter[torch.device]()
        weights = Counter[torch.device]()
        updated, num_updated = Counter[torch.device](), Counter[torch.device]()
        for name, parameter in self.model.named_parameters():
            (numbers if parameter.requires_grad else weights)[device_of(name)] += parameter.nbytes
            if parameter.requires_grad and not name.startswith(unused):
                updated[device_of(name)] += parameter.nbytes
                num_updated[device_of(name)] += 1
        for device in devices:
            trained = numbers[device]
            assert live[device]["weights"] == weights[device], device
            assert live[device]["adapters"] == live[device]["average"] == trained, device
            assert live[device]["gradients"] == updated[device], device
            assert (
                live[device]["optimizer"]
                == STATE_OF_ADAMW * updated[device] + 4 * num_updated[device]
            ), device
        # Each boundary is passed once, forward and backward, and nothing is sent anywhere else,
        # recompute included.
        expected = [Counter[Any](), Counter[Any](), Counter[Any]()]
        boundaries = list(itertools.pairwise(devices))
        assert len(self.carried) == len(boundaries)
        for (before, after), carry in zip(boundaries, self.carried, strict=True):
            expected[0][before, after] = carry["tensors"]
            expected[1][after, before] = carry["gradients"]
            expected[2][before, after] = carry["bytes"]
        crossings = self.crossings
        host = torch.device("cpu")
        for count, want in zip(
            (crossings.forward, crossings.backward, crossings.forward_bytes), expected, strict=True
        ):
            assert {way: n for way, n in count.items() if host not in way} == want
        assert not any(to == host for _, to in [*crossings.forward, *crossings.backward]), (
            "something is fetched to the host"
        )
        # inputs are sent to the first device, targets and weights of the loss to the last
        sent_to = {to for sender, to in crossings.forward if sender == host}
        assert sent_to <= {placement.embed, placement.head}, sent_to


def divided_step(
    spec: ModelSpec,
    arch: Any,
    placement: Callable[[Any], Placement],
    items: Sequence[Mapping[str, Tensor]],
    *,
    policy: str,
    rank: int,
    patch: Any,
    steps: int = 1,
) -> Divided:
    """Optimizer steps of an adapted model: forward, backward, clipping, AdamW, average.

    Args:
        spec: The family.
        arch: The architecture.
        placement: The model on `meta` to where its stages are.
        items: Of one micro-batch, as `spec.training.empty_item` makes them.
        policy: Of activation checkpointing.
        rank: Of the adapters.
        patch: pytest's `monkeypatch`; it watches what the engine moves.
        steps: The optimizer's state exists from the second on, so that the peak is as in any later
            one.
    """
    model = build_on_meta(spec, arch, Precision())
    inject(model, AdapterConfig(rank=rank), spec.adapters.targets)
    placed, carried = placement(model), _watched_carries(patch)
    engine, flow = BlockEngine(policy=policy), FlowConfig()
    with FakeTensorMode(), as_on("cuda"), MemoryTracker() as ledger:
        trained = _materialised(spec, model, placed, ledger)
        fake_items = [
            {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in item.items()}
            for item in items
        ]
        batch = Batch(ids=[f"clip {i}" for i in range(len(fake_items))], items=fake_items)
        for step in range(steps):
            trained.optimizer.zero_grad()
            ledger.restart_peak()
            carried.clear()
            with Crossings() as crossings:
                accumulate_gradients(
                    Model(model, engine, spec), [batch], StepContext(step=step, seed=0, flow=flow)
                )
            gradients = trained.optimizer.gradients()
            ledger.track(list(gradients.values()), "gradients")
            with ledger.purpose("optimizer" if step == 0 else "activations"):
                update(
                    trained.optimizer,
                    total_norm(list(gradients.values())),
                    lr=1e-4,
                    clipping=Clipping(max_norm=1.0),
                )
            trained.average.update(step + 1)
        # what the first update left behind next to the optimizer's state is gone
        ledger.track(list(trained.optimizer.state()[0].values()), "optimizer")
    return Divided(model, placed, trained, crossings, ledger, carried)


def _watched_carries(patch: Any) -> list[Counter[str]]:
    """A list to which each move of a carry by the engine adds what `Divided.carried` has."""
    from ditkit_core.engine import engine as activation_checkpoint

    carried: list[Counter[str]] = []
    moved = activation_checkpoint.move_carry

    def watched(carry: Any, device: torch.device) -> Any:
        tensors = [leaf for leaf in tree_leaves(carry) if isinstance(leaf, Tensor)]
        gradients = sum(tensor.requires_grad for tensor in tensors)
        sizes = sum(tensor.nbytes for tensor in tensors)
        carried.append(Counter(tensors=len(tensors), gradients=gradients, bytes=sizes))
        return moved(carry, device)

    patch.setattr(activation_checkpoint, "move_carry", watched)
    return carried


def _materialised(
    spec: ModelSpec, model: Any, placed: Placement, ledger: MemoryTracker
) -> TrainState:
    """The training state of a model whose stages get fake parameters where they are placed, counted
    by purpose."""
    names = {id(module): name for name, module in model.named_modules()}
    for stage, device in zip(
        (model.embed, *model.blocks(), model.head),
        (placed.embed, *placed.blocks, placed.head),
        strict=True,
    ):
        materialise(stage, names[id(stage)], spec, dtype=torch.bfloat16, device=device)
    ledger.track([p for p in model.parameters() if not p.requires_grad], "weights")
    trained = TrainState(
        model,
        {n: p for n, p in model.named_parameters() if p.requires_grad},
        OptimConfig(),
        EMAConfig(decay=0.9),
    )
    ledger.track(list(trained.parameters.values()), "adapters")
    ledger.track(list(trained.average.values.values()), "average")
    return trained


def balanced(spec: ModelSpec, num_devices: int) -> Callable[[Any], Placement]:
    """Splits a model evenly over devices by its weights and the adapters' training state, as a run
    without a plan does."""

    def divided(model: Any) -> Placement:
        profile = weights_profile(model, spec, Precision(), averaged=True)
        budgets = [
            Budget(name=str(device), total=10**12, workspace=0) for device in DEVICES[:num_devices]
        ]
        return place_blocks(model, DEVICES[:num_devices], choose_split_points(profile, budgets))

    return divided
