"""tools/gpu/gpu_models.py on small models: the same layers in both adapters, steps as the loop
takes them, plans next to measurements."""

import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ditkit_core.loading.model import Model
from ditkit_core.testing.recorded_graph import recorded_graphs
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.train_step import StepContext, training_step
from workspace import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import gpu_models

    return gpu_models


@pytest.mark.parametrize("part", ["klein4b", "wan14b"])
def test_diffusers_trains_the_same_layers(models: Any, part: str) -> None:
    case = models.small(models.CASES[part][0])
    ours, theirs = models.build(case, CPU, True).module, models.their_model(case, CPU, True).module
    trained = [models.weights(module)["trained"] for module in (ours, theirs)]
    assert trained[0] == trained[1] > 0
    assert {p.dtype for p in theirs.parameters() if p.requires_grad} == {torch.float32}


def test_ours_is_timed_in_several_modes_next_to_plans_and_diffusers(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        models,
        "plan_of",
        lambda case, mode, *others: models.Planned(peak=2 * models.GIB, seconds=3.0),
    )
    rows = list(models.models("klein4b", CPU, True))
    case = models.small(models.CASES["klein4b"][0])
    steps = {row["name"]: row for row in rows if "steps" in row}
    names = [str(mode) for mode in case.modes] + [f"diffusers, {policy}" for policy in case.theirs]
    assert (
        list(steps) == [f"{case.name}, {name}" for name in names]
        and len(steps) == len(rows) - 2 == 3
    )
    assert all(
        row["ok"] and row["seconds"] >= row["fastest"] > 0 and row["launches"] > 100
        for row in steps.values()
    )
    plans = [(2.0, 3.0)] * len(case.modes) + [(None, None)] * len(case.theirs)
    assert [(row.get("planned GiB"), row.get("planned seconds")) for row in steps.values()] == plans


def test_a_step_is_that_of_the_loop(models: Any) -> None:
    """Its loss is bitwise that of `training_step` where nothing is prepared ahead, and it
    trains."""
    case = models.small(models.CASES["klein4b"][0])
    torch.manual_seed(0)
    model = models.build(case, CPU, True)
    plain = Model(
        model.module,
        models.BlockEngine(policy="full"),
        model.spec,
        model.trained.optimizer.parameters,
    )
    context = StepContext(step=0, seed=0, flow=FlowConfig())
    expected = training_step(
        plain, [model.batch], model.trained.optimizer, context, lr=0.0, clip_norm=1.0
    ).loss
    with models.step_of(model, models.Mode(policy="full", kernels="torch")) as step:
        first, second = step(), step()
    assert first == expected and second != first


def test_a_replayed_step_is_recorded_behind_the_first_and_its_graph_is_freed(
    models: Any, capsys: Any
) -> None:
    """On a CPU a stand-in records and replays; without it the step runs eagerly, and a line says
    why."""
    case = models.small(models.CASES["klein4b"][0])
    replayed, eager = (
        models.Mode(policy="full", kernels="torch", cuda_graphs=way) for way in ("on", "off")
    )
    losses, kept = [], []
    for mode in (eager, replayed):
        torch.manual_seed(0)
        model = models.build(case, CPU, True)
        with recorded_graphs(), models.step_of(model, mode) as step:
            losses.append([step() for _ in range(4)])
            replays = inspect.getclosurevars(step).nonlocals["context"].replays
            kept.append((replays, len(replays) if replays else 0))
    assert losses[0] == losses[1] and len(set(losses[0])) == 4
    assert kept[0] == (None, 0) and kept[1][1] == 1 and len(kept[1][0]) == 0
    with models.step_of(model, replayed) as step:
        step()
    assert (
        "UserWarning: train.cuda_graphs = on: micro-batches run eagerly, because the device is no "
        "GPU" in capsys.readouterr().err
    )


def test_a_plan_that_is_off_by_more_than_it_may_fails_and_a_step_that_diverges(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import Future

    allocated = [8 * models.GIB]
    for name, value in {
        "reset_peak_memory_stats": lambda device: None, "max_memory_allocated": lambda device: 10 * models.GIB,
        "max_memory_reserved": lambda device: 12 * models.GIB, "memory_allocated": lambda device: allocated[0],
        "mem_get_info": lambda device: (0, 80 * models.GIB),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(models, "seconds", lambda step, device: step() or 2.0)
    case, gpu = (
        models.Case(name="", family="wan", preset="", size=(1, 1, 1), modes=(), repeats=2),
        torch.device("cuda", 0),
    )

    def row(peak: float, loss: float) -> Any:
        planned: Future[Any] = Future()
        planned.set_result(models.Planned(peak=int(peak * models.GIB), seconds=1.0))
        (one,) = models._row({"name": "a step"}, nullcontext(lambda: loss), case, gpu, planned)
        return one

    right = row(10.4, 1.0)
    assert (
        right["ok"]
        and right["planned / measured"] == pytest.approx(1.04)
        and right["time planned / measured"] == 0.5
    )
    assert (right["peak GiB"], right["reserved GiB"], right["steps"]) == (10, 12, 2)
    allocated[0] = 62 * models.GIB
    assert row(81, 1.0)["value"] == "more than this GPU has" and "seconds" in row(10.4, 1.0)
    assert (
        not row(10.6, 1.0)["ok"] and not row(9.4, 1.0)["ok"] and not row(10.0, float("nan"))["ok"]
    )


def test_every_case_is_a_published_model_at_its_size(models: Any) -> None:
    numbers = {}
    for part, cases in models.CASES.items():
        assert len({(case.family, case.preset, case.method) for case in cases}) == 1, (
            "one model for a part"
        )
        for case in cases:
            spec, arch, _, item = models.described(case, False)
            numbers[case.name] = spec.training.num_tokens(item) if spec.training.num_tokens else 0
            assert arch.dim >= 1536 and set(case.theirs) <= {"none", "full"}, part
    assert (
        numbers["Wan 14B 480x832x49"] == 20280
        and numbers["Wan 1.3B full fine-tune 720x1280x77"] == 72000
    )
