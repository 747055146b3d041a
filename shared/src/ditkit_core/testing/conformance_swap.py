"""Checks for every model that streaming weights through a device changes no number, and keeps no
more blocks on the device than it says."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.block_swap import BlockSwap, choose_streamed
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.pinned_memory import HOST
from ditkit_core.engine.placement import Placement
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.combinations import every_value
from ditkit_core.testing.live_bytes import LiveBytes
from ditkit_core.testing.observer import Observer
from ditkit_core.testing.pretend_devices import PretendDevices, move_to, on_host
from ditkit_core.testing.world import (
    ADAPTERS,
    Items,
    ModelChecks,
    differing,
    make_model,
    outcome,
    train_shortly,
)
from ditkit_core.training.config import ClipBy, EMAConfig, FlowConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, StepResult, training_step

_ADAPTERS = ("lora", "lora with dropout", "dora")
_SECOND = torch.device("cpu:1")
_STREAMED = {"all": 1, "every other": 2}
"""Of how many blocks one is streamed."""


class Watched(Observer):
    """Inside the block every operation is held against the weights that are there.

    Attributes:
        most: Most streamed blocks of one device that were there at once.
        fetched: Copies from the host, by position among the streamed blocks.
        returned: Copies to the host's buffers.

    Raises:
        AssertionError: If an operation reads a weight that is not there.
    """

    def __init__(self, swap: BlockSwap) -> None:
        super().__init__()
        self.most, self.fetched, self.returned = 0, Counter[int](), 0
        self._swap = swap
        self._places = {buffer.untyped_storage()._cdata: i for i, buffer in enumerate(swap.buffers)}
        self._hosts = {buffer.untyped_storage()._cdata for buffer in swap.host_buffers}

    def there(self) -> Counter[torch.device]:
        """How many blocks are there now, by device."""
        return Counter(
            buffer.device for buffer in self._swap.buffers if buffer.untyped_storage().nbytes()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            for leaf in args:
                for tensor in leaf if isinstance(leaf, (list, tuple)) else (leaf,):
                    self._check(func, tensor)
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        storage = args[0].untyped_storage()._cdata
        self.returned += storage in self._hosts
        if storage in self._places:
            self.fetched[self._places[storage]] += 1
            self.most = max(self.most, *self.there().values())
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, tensor: Any) -> None:
        if (
            isinstance(tensor, Tensor)
            and (storage := tensor.untyped_storage())._cdata in self._places
        ):
            assert storage.nbytes(), f"{func} reads weights that are not there"


def stream(
    model: Any,
    one_of: int = 1,
    devices: Sequence[torch.device] | None = None,
    *,
    trained: bool = False,
) -> BlockSwap:
    """Stream one of so many blocks of each device.

    Args:
        model: The model, its weights wherever they are.
        one_of: 1 streams all.
        devices: Of each block; by default all are on the host.
        trained: Whether trained weights are streamed, too.
    """
    blocks = model.blocks()
    all_resident = Placement(embed=HOST, blocks=tuple(devices or [HOST] * len(blocks)), head=HOST)
    has_weights = [next(block.parameters(), None) is not None for block in blocks]
    counts = Counter(
        device for device, has in zip(all_resident.blocks, has_weights, strict=True) if has
    )
    wanted = [max(1, counts[device] // one_of) for device in dict.fromkeys(all_resident.blocks)]
    streamed = choose_streamed(all_resident, wanted, has_weights)
    placement = Placement(embed=HOST, blocks=all_resident.blocks, head=HOST, streamed=streamed)
    return BlockSwap(model, placement, trained=trained)


def train_streamed(
    spec: ModelSpec,
    model: Any,
    items: Items,
    engine: BlockEngine,
    *,
    optimizer: str = "adamw",
    lr: float = 1e-2,
    num_steps: int = 2,
    ema: EMAConfig | None = None,
) -> tuple[list[StepResult], dict[str, Tensor]]:
    """`train_steps` of a full fine-tune on one batch: steps of the ordinary loop, or, under an
    engine that streams trained weights, in the backward."""
    streams = any(isinstance(hook, BlockSwap) for hook in engine.hooks)
    config = OptimConfig(name=optimizer, lr=lr, fused_backward=streams)
    batch = Batch(
        ids=[f"clip {i}" for i in range(len(items))], items=[dict(item) for item in items]
    )
    return train_steps(spec, model, [batch], engine, config, num_steps=num_steps, ema=ema)


def train_steps(
    spec: ModelSpec,
    model: Any,
    batches: Sequence[Batch],
    engine: BlockEngine,
    config: OptimConfig,
    *,
    num_steps: int = 2,
    ema: EMAConfig | None = None,
    clip_by: ClipBy = "step",
    clip_norm: float = 0.0,
) -> tuple[list[StepResult], dict[str, Tensor]]:
    """Steps on the same micro-batches.

    Returns:
        What the steps report, and the weights, the optimizer's state and the average after them, on
        the host.
    """
    swap = next((hook for hook in engine.hooks if isinstance(hook, BlockSwap)), None)
    trained = TrainState(model, trainable_parameters(model), config, ema or EMAConfig(), swap)
    reported, flow = [], FlowConfig(weighting="bell")
    for step in range(num_steps):
        context = StepContext(
            step=step, seed=1, flow=flow, clip_by=clip_by, last_norm=trained.last_norm
        )
        there = Model(model, engine, spec)
        reported.append(
            training_step(
                there, batches, trained.optimizer, context, lr=config.lr, clip_norm=clip_norm
            )
        )
        trained.last_norm = reported[-1].grad_norm
        trained.average.update(step + 1)
    trained.optimizer.zero_grad()
    groups = trained.state_dict().tensors
    return reported, {
        f"{group} {name}": on_host(t)
        for group, tensors in groups.items()
        for name, t in tensors.items()
    }


class SwapChecks(ModelChecks):
    """Part of `Conformance`; needs its `spec`, `arch` and `items`."""

    @pytest.mark.parametrize(
        ("streamed", "policy"),
        every_value(
            [*((name, "all") for name in _ADAPTERS), ("lora with dropout", "every other")], POLICIES
        ),
    )
    def test_streaming_changes_no_bit(self, streamed: tuple[str, str], policy: str) -> None:
        """At most two blocks are resident, no copy is unnecessary, and none goes back to the
        host."""
        adapter, one_of = streamed
        items = self.items(2, ragged=True)
        model: Any = make_model(
            self.spec, self.arch, dtype=torch.bfloat16, adapter=ADAPTERS[adapter]
        )
        plain = outcome(self.spec, model, items, BlockEngine(policy=policy))
        names = list(model.state_dict())
        swap = stream(model, _STREAMED[one_of])
        assert list(model.state_dict()) == names
        for _ in range(2):
            with Watched(swap) as watch:
                under = outcome(self.spec, model, items, BlockEngine(policy=policy, hooks=(swap,)))
            assert under.differences(plain) == []
            assert under.num_attention == plain.num_attention
            assert torch.equal(under.generator_state, plain.generator_state)
            count = len(swap.buffers)
            # the last two of the forward are there when the backward begins
            assert watch.fetched.total() == (2 * count - 2 if count > 1 else 1)
            assert watch.most == min(2, count) and watch.returned == 0
            assert not watch.there(), "nothing stays after a backward"

    @pytest.mark.parametrize(("policy", "adapter"), every_value(POLICIES, _ADAPTERS))
    def test_what_a_forward_keeps_holds_no_streamed_weight(self, policy: str, adapter: str) -> None:
        items, kept_bytes = self.items(2, ragged=True), []
        for streamed in (False, True):
            model: Any = make_model(
                self.spec, self.arch, dtype=torch.bfloat16, adapter=ADAPTERS[adapter]
            )
            swap = stream(model) if streamed else None
            existing = [*model.parameters(), *(swap.buffers if swap else [])]
            inputs = self.inputs(items)
            with LiveBytes(existing, inputs) as live:
                outputs = model(
                    inputs, engine=BlockEngine(policy=policy, hooks=() if swap is None else (swap,))
                )
                kept_bytes.append(live.total())
                del outputs
        assert kept_bytes[0] == kept_bytes[1]

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_streamed_model_trains_and_measures_alike_on_two_devices(self, policy: str) -> None:
        """A measurement and an optimizer step over two micro-batches, with dropout; each device has
        two blocks at most."""
        items = self.items(2, ragged=True)
        adapter = ADAPTERS["lora with dropout"]
        resident: Any = make_model(self.spec, self.arch, adapter=adapter)
        numbers, parameters = train_shortly(self.spec, resident, items, BlockEngine(policy=policy))
        divided: Any = make_model(self.spec, self.arch, adapter=adapter)
        blocks = divided.blocks()
        cut = max(1, len(blocks) // 2)
        for stage in [*blocks[cut:], divided.head]:
            move_to(stage, _SECOND)
        with PretendDevices():
            swap = stream(
                divided, devices=[HOST if i < cut else _SECOND for i in range(len(blocks))]
            )
            with Watched(swap) as watch:
                other_numbers, other_parameters = train_shortly(
                    self.spec, divided, items, BlockEngine(policy=policy, hooks=(swap,))
                )
        assert other_numbers == numbers
        assert differing(other_parameters, parameters) == []
        assert watch.most <= 2 and watch.returned == 0

    @pytest.mark.parametrize(("policy", "one_of"), every_value(POLICIES, list(_STREAMED)))
    def test_one_backward_over_several_streamed_forwards(self, policy: str, one_of: str) -> None:
        """As a pipelined step runs: every micro-batch's blocks are passed in turn, and nothing
        stays."""
        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS["lora with dropout"])
        plain = self._summed(model, BlockEngine(policy=policy))
        swap = stream(model, _STREAMED[one_of])
        with Watched(swap) as watch:
            under = self._summed(model, BlockEngine(policy=policy, hooks=(swap,)))
        assert differing(under, plain) == []
        assert watch.most <= 2 and not watch.there()

    def _summed(self, model: nn.Module, engine: BlockEngine) -> dict[str, Tensor]:
        """Gradients of the summed loss of three micro-batches."""
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        loss = torch.zeros(())
        for item in self.items(3, ragged=True):
            inputs = self.inputs([item])
            loss = loss + model(inputs, engine=engine)[0].float().square().mean()
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    @pytest.mark.parametrize("policy", POLICIES)
    def test_streaming_trained_weights_changes_no_bit(self, policy: str) -> None:
        """A full fine-tune that updates in the backward, against the ordinary loop; weights go back
        once a step, and none in a forward."""
        items, num_steps = self.items(2, ragged=True), 2
        plain = make_model(self.spec, self.arch)
        numbers, values = train_streamed(
            self.spec, plain, items, BlockEngine(policy=policy), num_steps=num_steps
        )
        model: Any = make_model(self.spec, self.arch)
        swap = stream(model, trained=True)
        with Watched(swap) as watch:
            engine = BlockEngine(policy=policy, hooks=(swap,))
            other_numbers, other_values = train_streamed(
                self.spec, model, items, engine, num_steps=num_steps
            )
        assert other_numbers == numbers
        assert differing(other_values, values) == []
        count = len(swap.buffers)
        assert watch.most == min(2, count) and not watch.there()
        assert watch.returned == num_steps * count
        assert watch.fetched.total() == num_steps * (2 * count - 2 if count > 1 else 1)
        with torch.no_grad(), Watched(swap) as watch:
            inputs = self.inputs(items)
            model(inputs, engine=BlockEngine(policy=policy, hooks=(swap,)))
        assert watch.fetched.total() and not watch.returned

    def test_streamed_samples_are_the_same(self) -> None:
        """Forwards without gradients, one after the other."""
        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS["lora"]).eval()
        (item,) = self.items(1)
        inputs = self.inputs([item])
        with torch.no_grad():
            (expected,) = model(inputs, engine=BlockEngine())
            swap = stream(model)
            for _ in range(3):
                with Watched(swap) as watch:
                    (sample,) = model(inputs, engine=BlockEngine(hooks=(swap,)))
                assert torch.equal(sample, expected)
                assert watch.most <= 2 and watch.fetched.total() <= len(swap.buffers) + 1
