"""Fake tensors of repeated operations, compared with torch's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from toy_jobs import toy_job

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.planner import memory_tracker
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.repeated_fakes import RepeatedFakes
from ditkit_core.testing.toy import ToyArch
from ditkit_core.training.optim.optimizers import OptimConfig


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RepeatedFakes, "_results", {})


def described(value: Any, inputs: tuple[Tensor, ...]) -> Any:
    """What can be said of a result: of a tensor also which inputs it shares memory with."""
    if not isinstance(value, Tensor):
        return [described(part, inputs) for part in value] if isinstance(value, tuple) else value
    storage = value.untyped_storage()
    return (
        *(value.shape, value.stride(), value.storage_offset(), value.dtype, value.device),
        *(value.requires_grad, storage.nbytes(), value.is_contiguous()),
        *(
            [x is value for x in inputs],
            [x.untyped_storage()._cdata == storage._cdata for x in inputs],
        ),
    )


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "new": lambda x, y: x @ y,
    "wider": lambda x, y: x.to(torch.float64) + 1,
    "number": lambda x, y: torch.arange(3, device=x.device) + 1,
    "number of another type": lambda x, y: torch.arange(3, device=x.device) + 1.0,
    "view": lambda x, y: x[1:].T,
    "view of a view": lambda x, y: x.view(8, 2).unsqueeze(0).expand(3, 8, 2),
    "in place": lambda x, y: x.add_(y),
    "out": lambda x, y: torch.mul(x, y, out=y),
    "several": lambda x, y: torch.topk(x, 2),
    "list": lambda x, y: torch.cat([x, y.T]),
    "complex": lambda x, y: torch.view_as_real(
        torch.view_as_complex(x.view(8, 2)).conj().resolve_conj()
    ),
    "constant": lambda x, y: torch.tensor(2.0).item(),
    "to another device or the same": lambda x, y: x.to("cpu:2"),
    "new on another device": lambda x, y: torch.zeros_like(x, device="cpu:3"),
    "new on no device": lambda x, y: torch.full((3,), 2.0),
    "number of the host": lambda x, y: x * torch.full((), 2.0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_repeated_operation_returns_what_torch_does(name: str) -> None:
    def results(mode: FakeTensorMode, device: str) -> list[Any]:
        with mode:
            pairs = [tuple(torch.empty(4, 4, device=device) for _ in range(2)) for _ in range(4)]
            return [described(OPERATIONS[name](*pair), pair) for pair in pairs]

    for device in ("cpu:1", "cpu:2", "cpu:1", "cpu"):
        assert results(RepeatedFakes(), device) == results(FakeTensorMode(), device)


def test_results_are_taken_for_equal_arguments_alone() -> None:
    with RepeatedFakes():
        x = torch.empty(4, 4)
        for _ in range(3):
            assert (x + 1).dtype == torch.float32
        asked = FakeTensorMode.cache_info().hits
        for _ in range(3):
            assert type(x + 1) is FakeTensor
        assert FakeTensorMode.cache_info().hits == asked
        assert torch.empty(4, 4, dtype=torch.int32).add(1).dtype == torch.int32
        assert torch.empty(4, 4, dtype=torch.int32).add(1.0).dtype == torch.float32
        with pytest.raises(RuntimeError):
            x + torch.empty(4, 4, device="cpu:1")


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [("lora", "adamw8bit"), pytest.param("full", "adamw", marks=pytest.mark.exhaustive)],
)
def test_a_profile_is_the_same_with_torch_alone(
    method: Any, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(
        toy_job(clip_norm=1.0, arch=ToyArch(dim=128, depth=2)),
        adapter=AdapterConfig(method=method, rank=64, targets=("qkv", "embed.text")),
        optim=OptimConfig(name=optimizer),
    )
    measured = profile(job, splits=False)
    assert profile(job, splits=False) == measured, "the second time from what was kept"
    monkeypatch.setattr(memory_tracker, "RepeatedFakes", FakeTensorMode)
    assert profile(job, splits=False) == measured


def test_what_an_operation_returns_is_computed_on_one_device_and_kept_for_all() -> None:
    asked = []
    for device in ("cpu:1", "cpu:2"):
        with RepeatedFakes():
            x = torch.empty(4, 4, device=device)
            before = FakeTensorMode.cache_info()
            assert ((x @ x.T) + 1).device == torch.device(device)
            after = FakeTensorMode.cache_info()
        asked.append(after.hits + after.misses - before.hits - before.misses)
    assert asked[0] > asked[1] == 0
