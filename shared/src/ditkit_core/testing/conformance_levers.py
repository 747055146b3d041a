"""The check that levers compose: checkpointing, division, streaming, offloading, a quantized base,
adapters and pipelining at once. Part of `Conformance`.

All combinations would take hours. Every pair of values of two levers is in some case, so that no
two of them can be at odds unnoticed; daily those of which one is not of the layers themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ditkit_core.adapters.assistant import add_assistant
from ditkit_core.adapters.inject import adapter_layers
from ditkit_core.engine.activation_offload import HostMemory
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.nn.lora import ASSISTANT
from ditkit_core.nn.quantized_layouts import LAYOUTS
from ditkit_core.testing.combinations import case_id, pairwise
from ditkit_core.testing.conformance_quantized import COMPUTED, OF_FILES, make_quantized
from ditkit_core.testing.conformance_routing import routing_of
from ditkit_core.testing.conformance_split import layouts
from ditkit_core.testing.conformance_swap import Watched, stream
from ditkit_core.testing.pretend_devices import PretendDevices, divide
from ditkit_core.testing.world import ADAPTERS, ModelChecks, differing, train_shortly

LEVERS: Mapping[str, Sequence[Any]] = {
    "policy": POLICIES,
    "quantize": ("none", *LAYOUTS, *COMPUTED, *OF_FILES),
    "adapter": [*(name for name in ADAPTERS if name != "full"), "dora next to an assistant"],
    "layout": ("ends alone", "three", "uneven"),
    "one_of": (0, 1, 2),
    "pipelined": (False, True),
    "offload": (False, True),
    "routed": (False, True),
}
"""Values by lever; `one_of`: of how many blocks one is streamed, 0 for none. A full fine-tune has
tests of its own: its base is not frozen."""

_ALIKE = ("fp8", "int8 computed")
"""Stored as `int8` and `fp8 computed` are; one is dequantized as the first, the other multiplied in
the steps of the second."""
_AT_ONCE = [
    ("full", "nf4", "lora with dropout", "uneven", 2, True, True, True),
    ("attn_only", "fp8 computed", "lora", "three", 1, True, True, True),
    ("full", "nvfp4", "lokr", "ends alone", 2, True, True, True),
    ("attn_only", "int8", "dora next to an assistant", "uneven", 1, True, True, True),
]
"""No lever is off."""


_DAILY = pairwise(
    # each way to store a weight and each product once: codes of fp8 go where those of int8 go
    {**LEVERS, "quantize": [kind for kind in LEVERS["quantize"] if kind not in _ALIKE]},
    first=_AT_ONCE,
    apart=[("quantize", "adapter")],
)
"""Without the pairs of an adapter and a quantized base, which exhaustive cases have: a layer shows
that each is alike on every device (`test_quantized_linear.py`)."""
_CASES = [
    *_DAILY[len(_AT_ONCE) :],
    *(
        pytest.param(case, marks=pytest.mark.exhaustive)
        for case in pairwise(LEVERS, first=_DAILY)[len(_DAILY) :]
    ),
]


def add_random_assistant(model: nn.Module) -> None:
    """An assistant of rank 3 next to each adapter, none of its factors zero."""
    random = torch.Generator().manual_seed(1)
    add_assistant(model, dict.fromkeys(adapter_layers(model), 3))
    for layer in adapter_layers(model).values():
        for factors in (layer.lora_A, layer.lora_B):
            factors[ASSISTANT].weight = nn.Parameter(
                0.1 * torch.randn(factors[ASSISTANT].weight.shape, generator=random),
                requires_grad=False,
            )


class LeverChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    def _model(self, quantize: str, adapter: str) -> Any:
        name, _, assistant = adapter.partition(" next to ")
        model = make_quantized(
            self.spec, self.arch, quantize, dtype=torch.bfloat16, adapter=ADAPTERS[name]
        )
        if assistant:
            add_random_assistant(model)
        return model

    @pytest.mark.parametrize("case", _AT_ONCE, ids=case_id)
    def test_levers_at_once_change_no_number(self, case: tuple[Any, ...]) -> None:
        """All of them: a family runs one case, which finds what its model breaks under any."""
        self._check_levers(*case)

    @pytest.mark.parametrize("case", _CASES, ids=case_id)
    def test_levers_together_change_no_number(self, case: tuple[Any, ...]) -> None:
        """With the cases above, every pair of values of two levers."""
        self._check_levers(*case)

    def _check_levers(
        self,
        policy: str,
        quantize: str,
        adapter: str,
        layout: str,
        one_of: int,
        pipelined: bool,
        offload: bool,
        routed: bool,
    ) -> None:
        """A measurement and an optimizer step, against the same base and adapter on one device,
        resident, nothing recomputed."""
        items = self.items(2, ragged=True)
        plain = self._model(quantize, adapter)
        router = routing_of(self.spec, self.arch, plain) if routed else None
        engine = BlockEngine(router=router)
        numbers, values = train_shortly(self.spec, plain, items, engine, pipelined=pipelined)
        model = self._model(quantize, adapter)
        devices = layouts(len(model.blocks()))[layout]
        divide(model, devices)
        with PretendDevices():
            swap = stream(model, one_of, devices[1:-1]) if one_of else None
            chosen = f"{policy}+offload" if offload else policy
            hooks = () if swap is None else (swap,)
            engine = BlockEngine(
                policy=chosen, hooks=hooks, host=HostMemory(smallest=0), router=router
            )
            if swap is None:
                actual, others = train_shortly(self.spec, model, items, engine, pipelined=pipelined)
            else:
                with Watched(swap) as watch:
                    actual, others = train_shortly(
                        self.spec, model, items, engine, pipelined=pipelined
                    )
                assert watch.most <= 2 and watch.returned == 0
        assert actual == numbers
        assert differing(others, values) == []
