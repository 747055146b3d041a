"""The checks of a model divided over devices: pretended ones, whose numbers are true. Part of
`Conformance`.

Whatever way the stages are laid out, everything is bitwise identical to the model on one device,
the carry crosses a boundary once, and nothing between the first launch of a step and its backward
makes anybody wait.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.io.rng import seed_of
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.combinations import daily, every_value
from ditkit_core.testing.full_size import Arithmetic
from ditkit_core.testing.pretend_devices import CountCrossings, PretendDevices, divide, on_host
from ditkit_core.testing.world import (
    ADAPTERS,
    ModelChecks,
    differing,
    make_model,
    micro_batches,
    outcome,
    train_shortly,
)
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.flow_matching import (
    NoisedBatch,
    loss_weight,
    sample_noise,
    velocity_errors,
)
from ditkit_core.training.train_step import StepContext, accumulate_gradients

DEVICES = tuple(torch.device("cpu", index) for index in (1, 2, 3, 4))
ONE, TWO, THREE, FOUR = DEVICES
FLOW = FlowConfig(weighting="bell")

Ways = Counter[tuple[torch.device, torch.device]]

# Every layout, and every adapter and policy with several of them: all combinations would take
# minutes.
_PAIRED = [
    ("ends alone", "full", "full"),
    ("by turns", "lora with dropout", "attn_only"),
    ("four", "dora", "full"),
    ("back to the first", "lora", "none"),
    ("three", "full", "attn_only"),
    ("uneven", "lora with dropout", "full"),
]


class SplitChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    cuts_alone: ClassVar[bool] = False
    """Whether a model is divided at one split point after the other, as the core's own is, or at
    all of them at once."""

    def _divided(self, adapter: str, devices: Sequence[torch.device] | None = None) -> Any:
        """A model with its embedding, each block and its head on these devices; None: all on the
        host."""
        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS[adapter])
        if devices is not None:
            divide(model, devices)
        return model

    @property
    def _layouts(self) -> dict[str, list[torch.device]]:
        return layouts(len(self._divided("full").blocks()))

    @pytest.mark.parametrize(("adapter", "policy"), every_value(list(ADAPTERS), POLICIES))
    def test_no_cut_changes_a_bit(self, adapter: str, policy: str) -> None:
        """Outputs, loss, gradients and recomputed operations, for every split point between two
        blocks."""
        items = self.items(2, ragged=True)
        undivided: Any = self._divided(adapter)
        expected = outcome(self.spec, undivided, items, BlockEngine(policy=policy))
        num = len(undivided.blocks())
        alone = [[ONE] * (1 + cut) + [TWO] * (num - cut + 1) for cut in range(1, num)]
        # What a stage has of one before, and not from the carry, is on another device, unless there
        # are three stages between them.
        at_once = [[DEVICES[stage % len(DEVICES)] for stage in range(num + 2)]]
        for devices in alone if self.cuts_alone else at_once:
            divided = self._divided(adapter, devices)
            with PretendDevices():
                result = outcome(self.spec, divided, items, BlockEngine(policy=policy))
            assert result.differences(expected) == [], devices
            assert result.num_attention == expected.num_attention, devices
            assert torch.equal(result.generator_state, expected.generator_state), (
                f"{devices} leaks random state"
            )

    @pytest.mark.parametrize(("layout", "adapter", "policy"), _PAIRED)
    def test_no_layout_changes_a_number_of_training(
        self, layout: str, adapter: str, policy: str
    ) -> None:
        """A measurement and an optimizer step: two to four devices, embedding or head alone, back
        to a device, any order."""
        items = self.items(2, ragged=True)
        numbers, values = train_shortly(
            self.spec, self._divided(adapter), items, BlockEngine(policy=policy)
        )
        divided = self._divided(adapter, self._layouts[layout])
        with PretendDevices():
            other_numbers, other_values = train_shortly(
                self.spec, divided, items, BlockEngine(policy=policy)
            )
        assert other_numbers == numbers
        assert differing(other_values, values) == []

    @pytest.mark.parametrize(("layout", "adapter", "policy"), _PAIRED)
    def test_a_carry_crosses_a_boundary_once(self, layout: str, adapter: str, policy: str) -> None:
        """Copies are counted: constants are not sent again for each block, a recompute sends
        nothing, and back comes one gradient of each tensor that has one."""
        devices, there, back = self._layouts[layout], Ways(), Ways()
        outcome(
            self.spec,
            self._divided(adapter),
            self.items(2, ragged=True),
            _Tracer(devices, there, back),
        )
        assert there and back
        assert self._crossings(adapter, devices, policy) == (there, back)

    def _crossings(
        self, adapter: str, devices: Sequence[torch.device], policy: str
    ) -> tuple[Ways, Ways]:
        """Copies between devices in a forward, and in its backward."""
        model, launched = self._divided(adapter, devices), Ways()
        with PretendDevices(), CountCrossings() as crossings:

            def backward(loss: Tensor) -> None:
                launched.update(crossings.copies)
                loss.backward()

            outcome(
                self.spec,
                model,
                self.items(2, ragged=True),
                BlockEngine(policy=policy),
                backward=backward,
            )
        return _between_devices(launched), _between_devices(crossings.copies - launched)

    @pytest.mark.parametrize(
        ("adapter", "policy"), every_value(("full", "lora with dropout", "dora"), POLICIES)
    )
    def test_pipelined_micro_batches_equal_one_backward_over_their_sum(
        self, adapter: str, policy: str
    ) -> None:
        batches = [*micro_batches(self.items(2, ragged=True), 2), self._prior()]
        plain = self._divided(adapter)
        one_backward(self.spec, plain, batches)
        expected = _gradients(plain)
        divided = self._divided(adapter, self._layouts["three"])
        with PretendDevices():
            self._accumulate(divided, batches, policy, pipelined=True)
        gradients = _gradients(divided)
        assert differing(gradients, expected) == []

    @pytest.mark.parametrize("adapter", daily(tuple(ADAPTERS), "full", "lora with dropout"))
    def test_pipelining_changes_the_order_of_summation_alone(self, adapter: str) -> None:
        """Summed in any order, m numbers are off by at most (m - 1) half roundings of the sum of
        their sizes, so that two orders differ by at most m - 1 roundings of it. One more stands for
        what a micro-batch adds up itself, of a parameter that it uses twice.
        """
        batches = [*micro_batches(self.items(2, ragged=True), 3), self._prior()]
        model, sizes = self._divided(adapter), dict[str, Tensor]()
        self._accumulate(model, batches, "none", pipelined=False)
        one_by_one = _gradients(model)
        self._accumulate(model, batches, "none", pipelined=True)
        together = _gradients(model)
        for chosen in range(len(batches)):
            model.zero_grad(set_to_none=True)
            one_backward(self.spec, model, batches, chosen)
            sizes |= {
                name: gradient.abs() + sizes.get(name, 0)
                for name, gradient in _gradients(model).items()
            }
        for name, gradient in together.items():
            bound = len(batches) * torch.finfo(torch.float32).eps * sizes[name]
            assert bool(((gradient - one_by_one[name]).abs() <= bound).all()), name

    def _prior(self) -> Batch:
        """A micro-batch of prior preservation: it adds to the mean, and is not counted in it."""
        return Batch(
            ids=["class"], items=[dict(self.items(3, ragged=True)[2])], weights=[0.5], counted=0.0
        )

    def _accumulate(
        self, model: Any, batches: Sequence[Batch], policy: str, *, pipelined: bool
    ) -> None:
        model.zero_grad(set_to_none=True)
        accumulate_gradients(
            Model(model, BlockEngine(policy=policy), self.spec),
            batches,
            StepContext(step=3, seed=1, flow=FLOW, pipelined=pipelined),
        )

    @pytest.mark.parametrize("policy", POLICIES)
    def test_nothing_waits_or_crosses_but_the_carry_while_micro_batches_are_launched(
        self, policy: str
    ) -> None:
        """A number that the host reads would end the overlap, and so would a copy between any two
        devices: it waits for both."""
        batches = micro_batches(self.items(2, ragged=True), 3)
        devices = self._layouts["three"]
        divided = self._divided("lora with dropout", devices)
        with PretendDevices(), CountCrossings() as crossings, Arithmetic() as arithmetic:
            crossed: list[Ways] = []
            waited: list[str] = []
            divided.embed.register_forward_pre_hook(
                lambda *_: crossed.append(Ways(crossings.copies))
            )
            divided.head.register_forward_hook(lambda *_: crossed.append(Ways(crossings.copies)))
            divided.head.register_forward_hook(lambda *_: waited.extend(arithmetic.waits))
            accumulate_gradients(
                Model(divided, BlockEngine(policy=policy), self.spec),
                batches,
                StepContext(step=3, seed=1, flow=FLOW, pipelined=True),
            )
        assert len(crossed) == 2 * len(batches)
        launched = crossed[-1] - crossed[0]
        ways = {(a, b) for a, b in itertools.pairwise(devices) if a != b}
        assert set(launched) == ways, "besides the carry from device to device"
        assert waited == []
        assert [wait for wait in arithmetic.waits if not wait[-1].isdigit()] == [], (
            "in the backward gradients cross alone"
        )


def layouts(num_blocks: int) -> dict[str, list[torch.device]]:
    """Devices of embedding, blocks and head: cases that a split between two blocks does not
    cover."""
    uneven = sorted(random.Random(num_blocks).choices(range(1, num_blocks + 2), k=2))
    bounds = [0, *uneven, num_blocks + 2]
    return {
        "ends alone": [ONE, *[TWO] * num_blocks, THREE],
        "by turns": [*([TWO, ONE] * num_blocks)[: num_blocks + 1], THREE],
        "four": [THREE, FOUR, *[ONE] * (num_blocks - 1), TWO],
        "back to the first": [ONE, *[TWO] * (num_blocks - 1), ONE, ONE],
        "three": [ONE, TWO, *[THREE] * num_blocks],
        "uneven": [
            device for i, device in enumerate(DEVICES[:3]) for _ in range(bounds[i], bounds[i + 1])
        ],
    }


def one_backward(
    spec: ModelSpec, model: Any, batches: Sequence[Batch], chosen: int | None = None
) -> None:
    """Step 3 of a run of seed 1 written out: one backward over the sum of the losses of all
    micro-batches, or over the loss of one."""
    counted = sum(len(batch.ids) if batch.counted is None else batch.counted for batch in batches)
    total, position = torch.zeros(()), 0
    for micro, batch in enumerate(batches):
        shifts = [FLOW.shift_for(spec.training.shift(item["latents"])) for item in batch.items]
        named = enumerate(zip(batch.ids, batch.items, shifts, strict=True), start=position)
        sampled = [
            sample_noise(item["latents"], FLOW, shift, 1, "noise", 3, i, name)
            for i, (name, item, shift) in named
        ]
        position += len(sampled)
        if chosen not in (None, micro):
            continue
        torch.manual_seed(seed_of(1, "dropout", 3, micro))
        sigma, noise = torch.stack([level for level, _ in sampled]), [eps for _, eps in sampled]
        noised = NoisedBatch(batch.items, sigma, noise)
        errors = velocity_errors(Model(model, BlockEngine(), spec), noised, FLOW.guidance)
        factors = zip(batch.weights or [1.0] * len(sampled), sigma, shifts, strict=True)
        weights = torch.stack(
            [factor * loss_weight(level, FLOW, shift) for factor, level, shift in factors]
        )
        total = total + (errors * weights).sum() / counted
    total.backward()


def _gradients(model: Any) -> dict[str, Tensor]:
    named = trainable_parameters(model).items()
    return {
        name: on_host(parameter.grad) for name, parameter in named if parameter.grad is not None
    }


def _between_devices(ways: Ways) -> Ways:
    """Without copies from the host and to it: inputs, and their gradients."""
    return Ways(
        {way: count for way, count in ways.items() if None not in (way[0].index, way[1].index)}
    )


class _Tracer:
    """Runs a model on one device, and counts the transfers if its stages were on several: tensors
    of the carry, and gradients."""

    def __init__(self, devices: Sequence[torch.device], there: Ways, back: Ways) -> None:
        self._devices, self._there, self._back = devices, there, back

    def __call__(self, model: Any, inputs: Any) -> Any:
        carry, here = model.embed(inputs), self._devices[0]
        for stage, device in zip([*model.blocks(), model.head], self._devices[1:], strict=True):
            if next(stage.parameters(), None) is not None and device != here:
                self._there[here, device] += sum(
                    isinstance(leaf, Tensor) for leaf in tree_leaves(carry)
                )
                carry = tree_map_only(Tensor, lambda leaf: self._seen(leaf, here, device), carry)  # noqa: B023
                here = device
            carry = stage(carry)
        return carry

    def _seen(self, leaf: Tensor, here: torch.device, there: torch.device) -> Tensor:
        if not leaf.requires_grad:
            return leaf
        view = leaf.view_as(leaf)
        view.register_hook(lambda gradient: self._back.update([(there, here)]))
        return view
