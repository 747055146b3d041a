"""The checks that every model passes: subclass `Conformance`, give it the spec and a tiny
architecture, run pytest.

    class TestWan(Conformance):
        spec = WAN
        arch = WanArch(dim=32, …)

        def items(self, count, ragged=False):
            return [{"latents": …, "text": …} for _ in range(count)]

Features that must not change numbers are compared bitwise, on the CPU in one thread.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ditkit_core.engine import ac_schedule as policy_schedule
from ditkit_core.engine.ac_policies import Full, Policy
from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.run_block import CHECKPOINTS, Body, run_block
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision, compute_fp32_in_fp32
from ditkit_core.models.protocol import run_plain
from ditkit_core.nn.attention import attention
from ditkit_core.nn.attention.backends import BACKENDS
from ditkit_core.nn.context import BlockSettings, block_settings
from ditkit_core.run.checks import check_item
from ditkit_core.testing.carries import check_carry
from ditkit_core.testing.combinations import (
    NIGHTLY_FOR_FAMILIES,
    NIGHTLY_FOR_VARIANTS,
    NUM_FOR_FAMILIES,
    every_pair,
    every_value,
)
from ditkit_core.testing.conformance_fused import FusedChecks
from ditkit_core.testing.conformance_levers import LeverChecks
from ditkit_core.testing.conformance_offload import OffloadChecks
from ditkit_core.testing.conformance_policies import PolicyChecks
from ditkit_core.testing.conformance_precision import PrecisionChecks
from ditkit_core.testing.conformance_quantized import QuantizedChecks
from ditkit_core.testing.conformance_replay import ReplayChecks
from ditkit_core.testing.conformance_routing import RoutingChecks
from ditkit_core.testing.conformance_split import SplitChecks
from ditkit_core.testing.conformance_streams import StreamChecks, place_model
from ditkit_core.testing.conformance_swap import SwapChecks
from ditkit_core.testing.gpu import GPU, GPUS, gpu_of
from ditkit_core.testing.live_bytes import LiveBytes
from ditkit_core.testing.pretend_devices import PretendDevices, move_to
from ditkit_core.testing.world import (
    ADAPTERS,
    DTYPES,
    EVERYWHERE,
    Items,
    ModelChecks,
    backward_without_autocast,
    differing,
    make_model,
    outcome,
    train_shortly,
)
from ditkit_core.weights.fused_tensors import FusedTensors

# Recomputing runs attention twice, unless it is kept.
ATTENTION_FORWARDS = {"none": 1, "full": 2, "attn_only": 1}


_ON_A_GPU = [
    pytest.param(
        *case,
        marks=()
        if case in (("full", "none"), ("lora with dropout", "full"), ("dora", "attn_only"))
        else pytest.mark.exhaustive,
    )
    for case in itertools.product(ADAPTERS, POLICIES)
]
"""A GPU runs all. Its stand-in runs a case of each policy daily: that no adapter mixes devices,
`test_training_on_another_device_changes_no_number` finds."""


class CoreChecks(ModelChecks):
    """The checks of the interface between model and engine: stages, carry, checkpointing policies,
    precision, adapters, ragged batches."""

    one_in: ClassVar[int] = 1
    """For variants of a model that passes: each variant runs one in `one_in` of a check's
    combinations daily, at least one, and different ones for each variant; the rest are marked
    `exhaustive`. It should be coprime to the numbers of values, so that each value occurs."""
    slow: ClassVar[bool] = False
    """Whether the cases that a variant runs are of the slow set."""
    num_daily: ClassVar[Mapping[str, int]] = NUM_FOR_FAMILIES
    """How many combinations of single checks run daily; the core's own model runs all. Each family
    runs others."""
    nightly: ClassVar[tuple[str, ...]] = NIGHTLY_FOR_FAMILIES
    """Checks that run nightly; daily for the core's own model."""
    nightly_of_variants: ClassVar[tuple[str, ...]] = NIGHTLY_FOR_VARIANTS
    """Checks that variants run only nightly."""
    learning_rate: ClassVar[float] = 1e-2
    """Of the steps that must lower the loss of one batch: AdamW moves every weight by as much,
    whatever the layer's width."""

    def _outcome(
        self,
        model: Any,
        engine: BlockEngine | None,
        *,
        count: int = 2,
        ragged: bool = False,
        **options: Any,
    ) -> Any:
        return outcome(self.spec, model, self.items(count, ragged), engine, **options)

    # Structure

    def test_it_builds_on_meta_and_is_staged(self) -> None:
        with torch.device("meta"):
            model: Any = self.spec.architecture.build(self.arch, Precision())
        # Not by the protocol: from Python 3.12 on its check does not see submodules.
        assert all(
            isinstance(stage, nn.Module) for stage in (model.embed, *model.blocks(), model.head)
        )
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not list(model.buffers()), (
            "tables travel in the carry: a buffer is rounded by .to(dtype)"
        )

    def test_every_parameter_belongs_to_one_stage(self) -> None:
        model: Any = make_model(self.spec, self.arch)
        stages = [model.embed, *model.blocks(), model.head]
        names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        reached = Counter(
            names_by_id.get(id(p), "one that is not the model's")
            for stage in stages
            for p in stage.parameters()
        )
        astray = {*names_by_id.values()} ^ reached.keys() | {
            name for name, number in reached.items() if number > 1
        }
        assert not astray, f"parameters of no stage, or of several: {sorted(astray)}"

    def test_carries_are_what_they_are_annotated_as(self) -> None:
        model: Any = make_model(self.spec, self.arch)
        for ragged in (False, True):
            items = self.items(2, ragged)
            carry = model.embed(self.inputs(items))
            check_carry(carry)
            for block in model.blocks():
                carry = block(carry)
                check_carry(carry)

    def test_an_item_that_does_not_fit_is_found_on_meta(self) -> None:
        """This check tells a user before weights are read that the encoders belong to another
        model."""
        model: Any = make_model(self.spec, self.arch).to("meta")
        item = {name: tensor.to("meta") for name, tensor in self.items(1)[0].items()}
        check_item(self.spec, model, item)
        wider = {
            name: torch.cat([tensor, tensor[..., :1]], -1)
            for name, tensor in item.items()
            if name == "text"
        }
        with pytest.raises(UserError, match="belong to it"):
            check_item(self.spec, model, item | wider)

    def test_attention_calls_have_names_of_their_own(self) -> None:
        model: Any = make_model(self.spec, self.arch)
        names: list[str] = []

        class Names:
            """Replaces torch_remat's region, with which attention marks tensors to keep."""

            @staticmethod
            def region(function: Any, name: str, *, recompute: bool) -> Any:
                names.append(name)
                return function

            @staticmethod
            def recompute_needs_tensor(tensor: Tensor) -> None:
                pass

        items = self.items(1)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(attention, "remat", Names)
            carry = model.embed(self.inputs(items))
            for block in model.blocks():
                names.clear()
                with block_settings(BlockSettings(keep=())):
                    carry = block(carry)
                assert len(names) == len(set(names)), (
                    f"two calls of attend in {type(block).__name__} have one name: {names}"
                )

    def test_names_go_to_every_form_and_back(self) -> None:
        names = self.spec.architecture.names
        native = list(make_model(self.spec, self.arch).state_dict())
        for form, from_native in names.from_native.items():
            assembly = FusedTensors()
            for name in native:
                assert assembly.add(name, from_native(name)), (
                    f"{form} gives rows of {name} to another parameter too"
                )
            assert assembly.complete.keys() == assembly.parts.keys(), (
                f"{form} has rows that are no parameter's"
            )
            for foreign, parts in assembly.complete.items():
                assert names.to_native(foreign) == parts, f"{form}: {foreign}"
        assert names.to_native("no_such_part.weight") is None

    def test_default_targets_are_layers_of_the_model(self) -> None:
        layers = [
            name
            for name, layer in make_model(self.spec, self.arch).named_modules()
            if isinstance(layer, nn.Linear)
        ]
        (_, targets), *_ = self.spec.adapters.targets.items()
        astray = [
            target
            for target in targets
            if not any(f".{name}".endswith(f".{target}") for name in layers)
        ]
        assert not astray, f"adapter targets that match no Linear layer: {astray}"

    # Numbers

    @pytest.mark.parametrize(
        ("adapter", "dtype", "ragged"),
        # of adapters in bf16 every policy: `LeverChecks`; in fp32: `SplitChecks`
        every_pair(
            list(ADAPTERS | EVERYWHERE), list(DTYPES), (False, True), apart=[("0", "1"), ("0", "2")]
        ),
    )
    def test_no_policy_changes_a_bit(self, adapter: str, dtype: str, ragged: bool) -> None:
        model: Any = make_model(
            self.spec, self.arch, dtype=DTYPES[dtype], adapter=(ADAPTERS | EVERYWHERE)[adapter]
        )
        names = list(model.state_dict())
        plain = self._outcome(model, None, ragged=ragged)
        assert torch.isfinite(plain.loss) and any(g is not None for g in plain.gradients.values())
        for policy in POLICIES:
            under = self._outcome(model, BlockEngine(policy=policy), ragged=ragged)
            assert under.differences(plain) == [], policy
            assert under.num_attention == plain.num_attention * ATTENTION_FORWARDS[policy], policy
            assert torch.equal(under.generator_state, plain.generator_state), (
                f"{policy} leaks random state"
            )
        assert list(model.state_dict()) == names

    @pytest.mark.parametrize("adapter", [*ADAPTERS, *EVERYWHERE])
    def test_reentrant_checkpoints_change_no_gradient(self, adapter: str) -> None:
        """A recompute with its own backward frees graphs outside of a block's arguments, so the
        carry must contain everything.

        No engine of ours works this way, but offloading by layers does. fp64 with a tolerance of
        1e-12, because gradients of tensors that a block uses twice are summed in the block first.
        """
        model: Any = make_model(
            self.spec, self.arch, dtype=torch.float64, adapter=(ADAPTERS | EVERYWHERE)[adapter]
        )
        plain = self._outcome(model, None, ragged=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(policy_schedule.MAKERS, "reentrant", lambda arguments: _Reentrant())
            patch.setitem(CHECKPOINTS, _Reentrant, _keeping_nothing_reentrantly)
            under = self._outcome(model, BlockEngine(policy="reentrant"), ragged=True)
        assert under.num_attention == 2 * plain.num_attention
        assert all(map(torch.equal, under.outputs, plain.outputs))
        largest = max(
            float(gradient.norm()) for gradient in plain.gradients.values() if gradient is not None
        )
        for name, expected in plain.gradients.items():
            gradient = under.gradients[name]
            if expected is None or gradient is None:
                # Such a recompute has zeros where nothing reads a layer's result.
                assert expected is gradient or (
                    name.startswith(self.idle) and gradient is not None and not gradient.any()
                ), name
            else:
                error, size = float((gradient - expected).norm()), float(expected.norm())
                assert error <= 1e-12 * max(size, 1e-2 * largest), (name, error, size)

    @pytest.mark.parametrize(("adapter", "dtype"), every_value(list(ADAPTERS), list(DTYPES)))
    def test_a_policy_holds_what_it_says(self, adapter: str, dtype: str) -> None:
        """Bytes alive after a forward of all blocks: `attn_only` adds to `full` exactly the tensors
        that attention made."""
        model: Any = make_model(
            self.spec, self.arch, dtype=DTYPES[dtype], adapter=ADAPTERS[adapter]
        )
        items = self.items(2, ragged=True)
        none, by_attention, joined = self._held(model, items, "none")
        full, attn_only = (self._held(model, items, policy)[0] for policy in ("full", "attn_only"))
        # Columns besides [tokens, dim]: the A product of an adapter on the last layer, and the mask
        # as attention takes it.
        num_columns = len(model.blocks()) * (4 + 2)
        narrow = (
            4
            * num_columns
            * len(items)
            * max(self.spec.training.num_tokens(item) for item in items)
        )
        assert none > attn_only > full
        # The result of a block's last operation is kept; that costs nothing if the next block keeps
        # it too, which one without parameters does not.
        assert -narrow <= attn_only - full - by_attention <= narrow + joined

    def _held(self, model: Any, items: Items, policy: str) -> tuple[int, int, int]:
        """Bytes alive after the forward of all blocks under a policy, the part that attention calls
        added, and the part that blocks without parameters took and did not pass on."""
        carry = model.embed(self.inputs(items))
        backend, by_attention, joined = BACKENDS["sdpa"], 0, 0
        with pytest.MonkeyPatch.context() as patch, LiveBytes(carry, *model.parameters()) as live:

            def kernel(*args: Any, **options: Any) -> Tensor:
                nonlocal by_attention
                before = live.total()
                out = backend.kernel(*args, **options)
                by_attention += live.total() - before
                return out

            patch.setitem(BACKENDS, "sdpa", replace(backend, kernel=kernel))
            for index, block in enumerate(model.blocks()):
                before = carry
                carry = run_block(block, carry, policy=parse_policy(policy), name=f"block {index}")
                if next(block.parameters(), None) is None:
                    joined += _bytes_taken(before, carry)
                del before
            return live.total(), by_attention, joined

    @pytest.mark.parametrize("policy", POLICIES)
    def test_an_outer_autocast_changes_nothing(self, policy: str) -> None:
        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS["lora"])
        plain = self._outcome(model, BlockEngine(policy=policy))
        with torch.autocast("cpu", torch.bfloat16):
            under = self._outcome(
                model, BlockEngine(policy=policy), backward=backward_without_autocast
            )
        assert under.differences(plain) == []

    @pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
    def test_backward_may_start_in_another_thread(self, policy: str) -> None:
        """Where it runs parts of the forward again."""

        def elsewhere(loss: Tensor) -> None:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()

        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS["lora with dropout"])
        here = self._outcome(model, BlockEngine(policy=policy))
        assert (
            self._outcome(model, BlockEngine(policy=policy), backward=elsewhere).differences(here)
            == []
        )

    @pytest.mark.parametrize(("adapter", "policy"), every_value(list(ADAPTERS), POLICIES))
    def test_training_on_another_device_changes_no_number(self, adapter: str, policy: str) -> None:
        """Fails on any operation that mixes the devices: a table, mask or noise left on the
        host."""
        items = self.items(2, ragged=True)
        here, there = (
            make_model(self.spec, self.arch, adapter=ADAPTERS[adapter]) for _ in range(2)
        )
        numbers, parameters = train_shortly(self.spec, here, items, BlockEngine(policy=policy))
        move_to(there, torch.device("cpu", 1))
        with PretendDevices():
            other_numbers, other_parameters = train_shortly(
                self.spec, there, items, BlockEngine(policy=policy)
            )
        assert other_numbers == numbers
        assert differing(other_parameters, parameters) == []

    @pytest.fixture(params=GPUS)
    def gpu(self, request: pytest.FixtureRequest) -> Iterator[GPU]:
        """A GPU, or its stand-in."""
        with gpu_of(request.param) as gpu:
            yield gpu

    @pytest.mark.parametrize(("adapter", "policy"), _ON_A_GPU)
    def test_a_gpu_trains_as_the_cpu_does(self, adapter: str, policy: str, gpu: GPU) -> None:
        """fp32; kernels differ from the CPU's, and some of them sum in any order. Dropout has a
        generator of its own."""
        compute_fp32_in_fp32()
        items = self.items(2, ragged=True)
        here, plain, there = (
            make_model(self.spec, self.arch, adapter=ADAPTERS[adapter]) for _ in range(3)
        )
        on_gpu: list[Any] = [plain, there]
        for model in on_gpu:
            place_model(model, [gpu.device] * len(model.blocks()))
        numbers, _ = train_shortly(self.spec, here, items, BlockEngine())
        plain_numbers, _ = train_shortly(self.spec, plain, items, BlockEngine())
        other_numbers, _ = train_shortly(self.spec, there, items, BlockEngine(policy=policy))
        assert other_numbers[0] == pytest.approx(numbers[0], rel=1e-4)  # measured without dropout
        assert other_numbers == pytest.approx(plain_numbers, rel=1e-3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
    def test_a_sample_in_a_ragged_batch_equals_itself_alone(self, dtype: torch.dtype) -> None:
        """Outputs and the gradients of every tensor that has one.

        The tolerance, 20 roundings, is the order of summation, which the padded length changes: Wan
        meets 6, FLUX.2 12. A mask that hides one key too few or too many makes 800,000 in fp32.
        """
        tolerance = 20 * torch.finfo(dtype).eps
        model: Any = make_model(self.spec, self.arch, dtype=dtype)
        items = [_differentiable(item, dtype) for item in self.items(3, ragged=True)]
        shapes = [item["latents"].shape for item in items]
        assert self.spec.training.num_tokens(items[0]) < self.spec.training.num_tokens(items[1])
        assert self.spec.training.num_tokens(items[0]) == self.spec.training.num_tokens(items[2])
        assert shapes[0] != shapes[2], (
            "as many tokens in another grid: what is padded shows no mistake there"
        )
        sigma = torch.tensor([0.2, 0.5, 0.9])
        weight = [
            torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)
            for shape in shapes
        ]

        def run(chosen: list[int]) -> tuple[list[Tensor], dict[str, Tensor]]:
            """Outputs, and gradients by name."""
            model.zero_grad(set_to_none=True)
            latents = [items[i]["latents"] for i in chosen]
            outputs = model(
                self.spec.training.make_inputs(
                    latents, sigma[chosen], [items[i] for i in chosen], 1.0
                )
            )
            loss = sum(
                ((weight[i] - o).square().sum() for i, o in zip(chosen, outputs, strict=True)),
                torch.zeros(()),
            )
            leaves = {
                f"{key} {i}": tensor
                for i in chosen
                for key, tensor in items[i].items()
                if tensor.requires_grad
            }
            leaves |= {name: p for name, p in model.named_parameters() if p.requires_grad}
            gradients = dict(
                zip(
                    leaves,
                    torch.autograd.grad(loss, list(leaves.values()), allow_unused=True),
                    strict=True,
                )
            )
            unused = [name for name, gradient in gradients.items() if gradient is None]
            unread = [name for name in unused if not name.startswith(self.idle)]
            assert not unread, unread
            return outputs, {
                name: gradient for name, gradient in gradients.items() if gradient is not None
            }

        alone = [run([i]) for i in range(3)]
        for chosen in ([0, 1, 2], [0, 2]):
            outputs, gradients = run(chosen)
            pairs = {
                f"output {i}": (output, alone[i][0][0])
                for i, output in zip(chosen, outputs, strict=True)
            }
            for name, gradient in gradients.items():
                pairs[name] = (
                    gradient,
                    sum(
                        (g[name] for _, g in (alone[i] for i in chosen) if name in g),
                        torch.zeros(()),
                    ),
                )
            # What is zero in exact arithmetic (the biases of keys) is rounding alone, and measured
            # against the largest.
            largest = max(float(expected.detach().norm()) for _, expected in pairs.values())
            for name, (together, expected) in pairs.items():
                error = float((together - expected).detach().norm())
                size = float(expected.detach().norm())
                assert together.shape == expected.shape, name
                assert error <= tolerance * max(size, 1e-2 * largest), (chosen, name, error, size)

    def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(self) -> None:
        model: Any = make_model(self.spec, self.arch, dtype=torch.bfloat16)
        bare = self._outcome(model, None, backward=lambda loss: None)  # its outputs alone
        adapted: Any = make_model(
            self.spec, self.arch, dtype=torch.bfloat16, adapter=ADAPTERS["lora"]
        )
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.zero_()
        with_adapter = self._outcome(adapted, None)
        assert all(map(torch.equal, bare.outputs, with_adapter.outputs))
        for name, parameter in adapted.named_parameters():
            is_adapter = "lora_" in name
            assert parameter.requires_grad == is_adapter, name
            assert (parameter.grad is not None) == is_adapter or (
                is_adapter and name.startswith(self.idle)
            ), name
            assert not is_adapter or parameter.dtype == torch.float32, name

    def test_what_stays_fp32_is_a_part_and_not_all(self) -> None:
        in_fp32 = [
            self.spec.precision.keep_fp32(name)
            for name in make_model(self.spec, self.arch).state_dict()
        ]
        assert any(in_fp32) and not all(in_fp32)

    @pytest.mark.parametrize("adapter", ["full", "lora"])
    def test_steps_on_one_batch_lower_its_loss(self, adapter: str) -> None:
        model: Any = make_model(self.spec, self.arch, adapter=ADAPTERS[adapter])
        items = self.items(2)
        inputs = self.inputs(items)
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=self.learning_rate
        )
        losses = []
        for _ in range(8):
            outputs = model(inputs, engine=run_plain)
            pairs = zip(outputs, items, strict=True)
            loss = sum(
                ((o.float() - i["latents"]).square().mean() for o, i in pairs), torch.zeros(())
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.9 * losses[0], losses


class Conformance(
    FusedChecks,
    LeverChecks,
    RoutingChecks,
    OffloadChecks,
    PolicyChecks,
    PrecisionChecks,
    SplitChecks,
    StreamChecks,
    SwapChecks,
    QuantizedChecks,
    ReplayChecks,
    CoreChecks,
):
    """All checks: inherit, set `spec` and `arch`, define `items`."""


def _bytes_taken(before: Any, after: Any) -> int:
    """Bytes of the tensors of a carry that the next one has no more."""
    passed_on = {id(leaf) for leaf in tree_leaves(after)}
    return sum(
        leaf.nbytes
        for leaf in tree_leaves(before)
        if isinstance(leaf, Tensor) and id(leaf) not in passed_on
    )


class _Reentrant(Full):
    """A policy whose recompute runs backwards by itself."""


def _keeping_nothing_reentrantly(
    policy: Policy, body: Body, tensors: list[Tensor], name: str
) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = checkpoint(body, *tensors, use_reentrant=True)
    return outputs


def _differentiable(item: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """An item whose float tensors all get a gradient."""
    return {
        key: tensor.to(dtype, copy=True).requires_grad_() if tensor.is_floating_point() else tensor
        for key, tensor in item.items()
    }
