"""tools/demo/distillation_study.py: its roles and targets, and that it runs; its tables are of
longer runs."""

from typing import Any

import pytest
import torch

from workspace import ROOT


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo"))
    import distillation_study

    monkeypatch.setattr(distillation_study, "BATCH", 4)
    monkeypatch.setattr(distillation_study, "CHECKED", 16)
    return distillation_study


def test_equal_distributions_are_at_no_distance(study: Any) -> None:
    random = torch.Generator().manual_seed(0)
    items = study.data(400, random)
    assert abs(study.distance([item["latents"] for item in items], items)) < 1e-5
    assert study.distance([torch.zeros_like(item["latents"]) for item in items], items) > 0.3


def test_a_role_keeps_its_values_and_targets_vanish_where_critic_and_teacher_agree(
    study: Any,
) -> None:
    """As at the start, where both adapters do nothing; and a critic that learned something moves
    the target, by its correction's size."""
    model = study.adapted(study.make_model(study.TOY, study.ARCH))
    critic, student = study.Role.of(model, 1e-2), study.Role.of(model, 1e-2)
    items = study.data(4, torch.Generator().manual_seed(0))
    for step in (0, 1):
        torch.manual_seed(step)
        batch, weights = study.student_batch(model, critic, student, items, step)
        level = study.LEVELS[step]
        assert weights.tolist() == [level**2 / 2] * 4 and batch.sigma.tolist() == [level] * 4
        with student.played(model):
            errors = study.velocity_errors(model, batch, 1.0)
        assert float(errors.detach().max()) < 1e-9
    with critic.played(model):
        for parameter in model.trainable.values():
            parameter.data += 0.05
    assert all(
        (critic.values[name] - student.values[name]).abs().min() > 0 for name in critic.values
    )
    torch.manual_seed(0)
    moved, _ = study.student_batch(model, critic, student, items, 1)
    with student.played(model):
        assert float(study.velocity_errors(model, moved, 1.0).detach().min()) > 1e-6
        assert all(torch.equal(p, student.values[name]) for name, p in model.trainable.items())


def test_it_prints_its_tables(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    study.distil(2, 2, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| teacher, 32 steps |") and [
        line.split(" |")[0] for line in lines[-3:]
    ] == [
        "| 0",
        "| 1",
        "| 2",
    ]
