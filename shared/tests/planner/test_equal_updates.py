"""An optimizer's step that is measured on some of its parameters, compared with the step of all."""

from dataclasses import replace

import pytest
from toy_jobs import toy_job

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.planner import profiler
from ditkit_core.planner.profiler import profile
from ditkit_core.testing.toy import ToyArch
from ditkit_core.training.optim.optimizers import OPTIMIZERS, OptimConfig


def test_a_step_from_weight_to_weight_is_measured_on_one_of_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights of fewer than 4096 values have a state of another kind."""
    pytest.importorskip("torchao")
    job = replace(
        toy_job(clip_norm=1.0, arch=ToyArch(dim=128, depth=2)),
        adapter=AdapterConfig(method="lora", rank=64, targets=("qkv", "embed.text")),
        optim=OptimConfig(name="adamw8bit"),
    )
    parts = []

    def counted(optimizer, meter):
        parts.append(optimizer)
        step_one_of_each(optimizer, meter)

    step_one_of_each = profiler.step_one_of_each
    monkeypatch.setattr(profiler, "step_one_of_each", counted)
    measured = profile(job, splits=False)
    assert parts
    del parts[:]
    kind = replace(OPTIMIZERS["adamw8bit"], one_after_another=False)
    monkeypatch.setitem(OPTIMIZERS, "adamw8bit", kind)
    assert profile(job, splits=False) == measured
    assert not parts
    assert any(cost.update_extra and cost.update_launches for cost in measured.blocks)
