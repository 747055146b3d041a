"""Checks of precision that every model passes: each place runs in its own dtype, for any dtypes of
the others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.models.precision import FAST, PLACES, Precision, set_precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.testing.combinations import every_pair, every_value
from ditkit_core.testing.observer import Observer
from ditkit_core.testing.world import (
    ADAPTERS,
    ModelChecks,
    backward_without_autocast,
    make_model,
    outcome,
)

MODEL_PLACES = tuple(
    group for group in PLACES if group not in ("accumulation", "optimizer", "reduction")
)
"""The places in a model's forward; the others are in the training step."""

_MATMULS = ("mm", "addmm", "bmm")
# At least one of these operations gives its result in the dtype of a place when that place alone
# has it. Where neighbours are wider, a sum is theirs, and the place is where it is rounded.
_OPERATIONS = {
    "matmul": _MATMULS,
    "timestep": ("mul", "_to_copy"),
    "rotary_tables": ("_to_copy",),
    "rotary": ("mul",),
    "qk_norms": ("mul", "_to_copy"),
    # an RMS norm is composed in a wider dtype, and rounded at its end
    "norms": ("native_layer_norm", "_to_copy"),
    "residual": ("addcmul", "add", "_to_copy"),
    "entry": ("native_layer_norm", "_to_copy"),
    "time_mlp": _MATMULS,
    "head": _MATMULS,
    "attention": ("_scaled_dot_product_flash_attention_for_cpu", "_safe_softmax", "_softmax"),
}


class _Dtypes(Observer):
    """Counts operations by name and dtype of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor):
            self.counts[func.__name__.split(".")[0], first.dtype] += 1
        return out

    def names(self, dtype: torch.dtype) -> set[str]:
        """Names of the operations that computed in a dtype."""
        return {name for name, result_dtype in self.counts if result_dtype == dtype}


@dataclass(frozen=True)
class _Result:
    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    forward: _Dtypes


class PrecisionChecks(ModelChecks):
    """One place narrower or wider than all others, outer autocast, presets under every policy."""

    places_without: ClassVar[tuple[str, ...]] = ()
    """Places that this family has no operation for."""
    head_norms: ClassVar[int] = 1
    """Norms of the head in a forward of the items."""
    modulation_operations: ClassVar[tuple[str, ...]] = ("addcmul", "mul")
    """ATen operations in the dtype of the modulation: ("add",) where the norms have no weight and
    scale by 1 + scale in a function of the core."""
    num_streams: ClassVar[int] = 1
    """Residual streams in the last carry."""

    def _result(self, precision: Precision, *, backward: bool = True) -> _Result:
        """A forward and backward with the weights of each place in its dtype, rounded from the same
        values."""
        checks: Any = type(self)
        return _result_of(checks, precision, backward)

    @pytest.mark.parametrize("group", MODEL_PLACES)
    def test_a_place_that_is_lowered_from_fp64_alone_runs_lower_alone(self, group: str) -> None:
        all_fp64 = dict.fromkeys(MODEL_PLACES, torch.float64)
        exact = self._result(Precision(**all_fp64))
        assert not exact.forward.names(torch.bfloat16) and not exact.forward.names(torch.float32)
        lowered = self._result(Precision(**{**all_fp64, group: torch.bfloat16}))
        names = lowered.forward.names(torch.bfloat16)
        if group in self.places_without:
            assert names <= {"_to_copy"} and relative_error(lowered.outputs, exact.outputs) == 0
            return
        operations = self._operations(group)
        assert names.intersection(operations), f"no {group} in bf16, only {sorted(names)}"
        # torch composes an RMS norm, and the norms of q and k are functions of ours, whose square
        # roots are in place.
        wide_norms = sum(
            lowered.forward.counts[name, torch.float64] for name in ("native_layer_norm", "rsqrt")
        )
        assert group != "norms" or wide_norms <= self.head_norms, (
            "only the head's norm is not one of `norms`"
        )
        assert all(
            value.isfinite().all() for value in (*lowered.outputs, *lowered.gradients.values())
        )
        assert exact.gradients.keys() == lowered.gradients.keys()
        assert 1e-6 < relative_error(lowered.outputs, exact.outputs) < 1
        head = torch.bfloat16 if group == "head" else torch.float64
        assert {output.dtype for output in lowered.outputs} == {head}

    @pytest.mark.parametrize("group", MODEL_PLACES)
    def test_a_place_that_is_raised_alone_runs_wider_alone(self, group: str) -> None:
        plain = dict.fromkeys(MODEL_PLACES, torch.float32) | {
            "matmul": torch.bfloat16,
            "attention": torch.bfloat16,
        }
        before = self._result(Precision(**plain), backward=False)
        raised = self._result(Precision(**{**plain, group: torch.float64}), backward=False)
        assert all(output.isfinite().all() for output in raised.outputs)
        # tables are made of fp64 angles: wider ones are not cast, but what takes them casts
        wide = torch.float32 if group == "rotary_tables" else torch.float64
        more = {
            name for name, dtype in raised.forward.counts - before.forward.counts if dtype == wide
        }
        assert more.intersection(self._operations(group)) or group in self.places_without, more

    def _operations(self, group: str) -> tuple[str, ...]:
        return self.modulation_operations if group == "modulation" else _OPERATIONS[group]

    def test_errors_come_in_the_right_order(self) -> None:
        """The timestep is the place that hurts most in bf16, in the output and in the gradient;
        fp32 hurts less everywhere."""
        all_fp64 = dict.fromkeys(MODEL_PLACES, torch.float64)
        exact = self._result(Precision(**all_fp64))
        inputs = [name for name in exact.gradients if name.startswith("input")]

        def errors(group: str) -> tuple[float, float]:
            lowered = self._result(Precision(**{**all_fp64, group: torch.bfloat16}))
            gradients = [[result.gradients[name] for name in inputs] for result in (lowered, exact)]
            return relative_error(lowered.outputs, exact.outputs), relative_error(
                gradients[0], gradients[1]
            )

        narrow = {group: errors(group) for group in MODEL_PLACES}
        for kind in range(2):
            assert max(narrow, key=lambda group: narrow[group][kind]) == "timestep", narrow
        for group in MODEL_PLACES:
            in_fp32 = Precision(**{**all_fp64, group: torch.float32})
            outputs = self._result(in_fp32, backward=False).outputs
            wide = relative_error(outputs, exact.outputs)
            assert wide < 0.05 * narrow[group][0] or group in self.places_without, (
                group,
                narrow[group],
                wide,
            )

    @pytest.mark.parametrize(
        ("preset", "outer"),
        every_value(("fast", "reference", "default"), (torch.bfloat16, torch.float16)),
    )
    def test_an_outer_autocast_changes_no_preset(self, preset: str, outer: torch.dtype) -> None:
        model: Any = make_model(
            self.spec, self.arch, dtype=torch.bfloat16, adapter=ADAPTERS["lora"]
        )
        set_precision(model, self._preset(preset))

        plain = outcome(self.spec, model, self.items(2), BlockEngine())
        with torch.autocast("cpu", outer):
            under = outcome(
                self.spec, model, self.items(2), BlockEngine(), backward=backward_without_autocast
            )
        assert under.differences(plain) == []

    @pytest.mark.parametrize(
        ("adapter", "preset", "policy"),
        every_pair(("full", "lora"), ("fast", "reference"), POLICIES),
    )
    def test_a_policy_changes_no_number_of_a_preset(
        self, adapter: str, preset: str, policy: str
    ) -> None:
        model: Any = make_model(
            self.spec, self.arch, dtype=torch.bfloat16, adapter=ADAPTERS[adapter]
        )
        set_precision(model, self._preset(preset))
        plain, under = (
            outcome(self.spec, model, self.items(2, True), run)
            for run in (None, BlockEngine(policy=policy))
        )
        assert under.differences(plain) == []

    def test_the_stream_has_the_dtype_of_its_place(self) -> None:
        """Carries between blocks: what `full` keeps of a block is the stream."""
        model: Any = make_model(self.spec, self.arch, dtype=torch.bfloat16)
        items = self.items(1)
        inputs = self.inputs(items)

        def carried(precision: Precision) -> int:
            set_precision(model, precision)
            carry = model.embed(inputs)
            for block in model.blocks():
                carry = block(carry)
            run_plain(model, inputs)
            return sum(
                tensor.nbytes
                for tensor in tree_leaves(carry)
                if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point
            )

        wide = carried(Precision())
        narrow = carried(replace(Precision(), residual=torch.bfloat16, entry=torch.bfloat16))
        stream = 2 * self.spec.training.num_tokens(items[0]) * self.arch.dim
        assert wide - narrow == self.num_streams * stream, (
            "num_tokens or num_streams differs from the last carry's stream"
        )

    def test_calls_keep_the_rotary_table_of_the_carry_and_no_copy_of_it(self) -> None:
        """A copy for each call would be kept by every block, and made again in its recompute."""
        if "rotary" in self.places_without:
            return
        model: Any = make_model(self.spec, self.arch, dtype=torch.bfloat16)
        carry = model.embed(self.inputs(self.items(2, ragged=True)))
        carried = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves(carry)
            if isinstance(leaf, Tensor)
        }
        addresses: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            if tensor.is_complex():
                addresses.append(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            for block in model.blocks():
                carry = block(carry)
        assert len(addresses) > 1 and carried.issuperset(addresses)

    def _preset(self, name: str) -> Precision:
        chosen = {"fast": FAST, "reference": self.spec.precision.reference, "default": {}}[name]
        dtypes = {"matmul": torch.bfloat16, "fp64": torch.float64, "fp32": torch.float32}
        return Precision(**{group: dtypes[dtype] for group, dtype in chosen.items()})


@cache  # checks of a class compare with the same few precisions
def _result_of(kind: Any, precision: Precision, backward: bool) -> _Result:
    checks, spec = kind(), kind.spec
    model: Any = make_model(spec, kind.arch, dtype=torch.float64)
    set_precision(model, precision)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.bfloat16().to(
            getattr(precision, spec.precision.op_group_of(name))
        )
    items = checks.items(2)
    latents = [item["latents"].double().requires_grad_() for item in items]
    wide = [{name: tensor.double() for name, tensor in item.items()} for item in items]
    torch.manual_seed(3)
    with _Dtypes() as forward:
        sigma = torch.tensor([0.7313, 0.2517], dtype=torch.float64)
        inputs = spec.training.make_inputs(latents, sigma, wide, 3.3)
        outputs = model(inputs, engine=BlockEngine())
    if backward:
        sum((output.double().square().mean() for output in outputs), torch.zeros(())).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {
        f"input {i}": latent.grad for i, latent in enumerate(latents) if latent.grad is not None
    }
    return _Result([output.detach() for output in outputs], gradients, forward)


def relative_error(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Norm of the difference, relative to the norm of the exact values."""
    pairs = [
        (one.double().flatten(), other.double().flatten())
        for one, other in zip(actual, exact, strict=True)
    ]
    ours, theirs = (torch.cat(values) for values in zip(*pairs, strict=True))
    return float((ours - theirs).norm() / theirs.norm())
