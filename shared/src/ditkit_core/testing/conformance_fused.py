"""The checks of a model whose optimizer steps in the backward. Part of `Conformance`."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.testing.combinations import case_id, pairwise
from ditkit_core.testing.conformance_split import layouts
from ditkit_core.testing.conformance_swap import stream, train_steps
from ditkit_core.testing.pretend_devices import PretendDevices, divide
from ditkit_core.testing.world import ADAPTERS, ModelChecks, differing, make_model
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepResult

COMBINATIONS = [
    *(("full", policy) for policy in POLICIES),
    ("lora", "attn_only"),
    ("lora with dropout", "full"),
    ("dora", "none"),
]
"""Adapter and policy."""
UPDATES = {
    "adamw": OptimConfig(lr=1e-2, fused_backward=True),
    "split": OptimConfig(lr=1e-2, fused_backward=True, rounding="split"),
    "adafactor": OptimConfig(name="adafactor", lr=1e-2, fused_backward=True, rounding="stochastic"),
}
"""How weights are stored and updated; without a rounding they are fp32."""
FULL_LEVERS: Mapping[str, Sequence[Any]] = {
    "policy": POLICIES,
    "update": tuple(UPDATES),
    "clip_by": ("last_step", "block"),
    "num_micro": (1, 2),
    "layout": ("one", "ends alone", "uneven"),
    "one_of": (0, 1, 2),
    "offload": (False, True),
}
"""What a full fine-tune on a small GPU needs, by lever; `one_of`: of how many blocks one is
streamed, 0 for none."""

_FULL_AT_ONCE = [
    ("full", "adafactor", "last_step", 1, "one", 1, False),
    ("attn_only", "split", "block", 1, "one", 1, False),
]
"""What a model can break: every weight is streamed, and updated when its gradient is there."""


def _is_possible(case: tuple[Any, ...]) -> bool:
    """Pretended devices cannot give a parameter values of another size, as rounding does; and
    nothing is offloaded from the host."""
    update, layout, offload = case[1], case[4], case[6]
    return layout == "one" and not offload if update != "adamw" else layout != "one" or not offload


_FULL_CASES = pairwise(FULL_LEVERS, _is_possible, first=_FULL_AT_ONCE, apart=[("update", "one_of")])
"""How weights are rounded where they are streamed, `test_stochastic_rounding.py` has."""


class FusedChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    @pytest.mark.parametrize(("adapter", "policy"), COMBINATIONS)
    def test_updating_in_the_backward_changes_no_bit(self, adapter: str, policy: str) -> None:
        """A weight must not be read after its update: not by a node of the backward, not by a
        recompute."""
        batch = Batch(
            ids=["clip 0", "clip 1"], items=[dict(item) for item in self.items(2, ragged=True)]
        )

        def steps(policy: str, *, fused: bool) -> tuple[list[StepResult], dict[str, Tensor]]:
            model = make_model(self.spec, self.arch, adapter=ADAPTERS[adapter])
            config = OptimConfig(lr=1e-2, fused_backward=fused)
            return train_steps(self.spec, model, [batch], BlockEngine(policy=policy), config)

        plain, fused = steps("none", fused=False), steps(policy, fused=True)
        assert fused[0] == plain[0]
        assert differing(fused[1], plain[1]) == []

    @pytest.mark.parametrize("case", _FULL_AT_ONCE, ids=case_id)
    def test_levers_of_a_full_fine_tune_change_no_bit(self, case: tuple[Any, ...]) -> None:
        """Streamed and updated in the backward at once: a family runs one case."""
        self._check_full_fine_tune(*case)

    @pytest.mark.parametrize("case", _FULL_CASES[len(_FULL_AT_ONCE) :], ids=case_id)
    def test_other_levers_of_a_full_fine_tune_change_no_bit(self, case: tuple[Any, ...]) -> None:
        """With the cases above, every pair of values of two levers."""
        self._check_full_fine_tune(*case)

    def _check_full_fine_tune(
        self,
        policy: str,
        update: str,
        clip_by: Any,
        num_micro: int,
        layout: str,
        one_of: int,
        offload: bool,
    ) -> None:
        """Updates in the backward under all of them, against the ordinary loop on one device,
        resident, nothing recomputed."""
        config = UPDATES[update]
        dtype = torch.float32 if config.rounding == "nearest" else torch.bfloat16
        plain: Any = make_model(self.spec, self.arch, dtype=dtype)
        items = [dict(item) for item in self.items(2, ragged=True)]
        parts = [items] if num_micro == 1 else [[item] for item in items]
        batches = [
            Batch(ids=[f"clip {i} {len(part)}" for i in range(len(part))], items=part)
            for part in parts
        ]
        # The second of the two steps is clipped, by either norm.
        steps = partial(train_steps, self.spec, batches=batches, clip_by=clip_by, clip_norm=0.05)
        expected = steps(plain, engine=BlockEngine(), config=replace(config, fused_backward=False))
        model: Any = make_model(self.spec, self.arch, dtype=dtype)
        devices = layouts(len(model.blocks())).get(layout)
        if devices is not None:
            divide(model, devices)
        with nullcontext() if devices is None else PretendDevices():
            swap = (
                stream(model, one_of, devices and devices[1:-1], trained=True) if one_of else None
            )
            chosen = f"{policy}+offload" if offload else policy
            engine = BlockEngine(
                policy=chosen, hooks=() if swap is None else (swap,), host=HostMemory(smallest=0)
            )
            actual = steps(model, engine=engine, config=config)
        assert actual[0] == expected[0]
        assert differing(actual[1], expected[1]) == []
