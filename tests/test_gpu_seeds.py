"""tools/gpu/gpu_seeds.py: what would be seen on a torch that casts no inputs where it recomputes,
and what FastVideo's policy keeps."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from workspace import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import gpu_seeds

    return gpu_seeds


def test_what_a_recompute_does_is_named_and_explicit_casts_must_work(
    seeds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradients(
        device: Any, is_explicit: bool, casts: bool, outside: bool, recomputes: bool
    ) -> list[torch.Tensor]:
        if not is_explicit and recomputes:
            raise CheckpointError(
                "torch.utils.checkpoint: Recomputed values have different metadata\nmore"
            )
        return [torch.ones(2), torch.full((2,), 1.0 + (recomputes and is_explicit and casts))]

    monkeypatch.setattr(seeds, "_gradients", gradients)

    def row(*, is_explicit: bool, casts_inputs: bool) -> Any:
        return seeds._recomputed(
            CPU, is_explicit=is_explicit, casts_inputs=casts_inputs, is_outside=True
        )

    assert row(is_explicit=False, casts_inputs=True) == {
        "name": "autocast islands, cast_forward_inputs=True, autocast outside",
        "value": "recomputed: CheckpointError: torch.utils.checkpoint: Recomputed values have different metadata",
    }
    assert row(is_explicit=True, casts_inputs=True)["value"] == "gradients differ without an error"
    right = row(is_explicit=True, casts_inputs=False)
    assert (right["value"], right["ok"]) == ("recompute equals none", True)
    monkeypatch.setattr(seeds, "_gradients", lambda *given: gradients(CPU, False, *given[2:]))
    assert row(is_explicit=True, casts_inputs=False)["ok"] is False


def test_kept_operations_are_attentions_forward_and_collectives(seeds: Any) -> None:
    kept = [
        "aten._scaled_dot_product_flash_attention.default", "flash_attn::_flash_attn_forward",
        "flash_attn_3::fwd",
        "_c10d_functional.all_to_all_single.default",
    ]  # fmt: skip
    recomputed = [
        "aten._scaled_dot_product_flash_attention_backward.default",
        "flash_attn::_flash_attn_backward", "aten.mm.default",
        "c10d.alltoall_base_.default",
    ]  # fmt: skip
    assert [seeds._is_attention(name) for name in kept + recomputed] == [True] * 4 + [False] * 4
