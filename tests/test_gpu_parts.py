"""What tools/gpu/gpu_parts.py runs on a GPU, or with models of real size, and leaves out of a tiny
run on a CPU: run here, as far as a CPU can."""

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ditkit_core.models.precision import compute_fp32_in_fp32
from ditkit_core.testing.world import ADAPTERS, make_model, outcome
from workspace import ROOT

CPU, GPU, GIB = torch.device("cpu"), torch.device("cuda", 0), 2**30


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import gpu_parts

    return gpu_parts


def test_the_facts_of_a_gpu(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first call 70 of 100 GiB are free, behind it 60, of which torch has 7."""
    free = iter([70, 60])
    for name, value in {
        "mem_get_info": lambda device: (next(free) * GIB, 100 * GIB), "memory_reserved": lambda device: 7 * GIB,
        "get_device_name": lambda device: "NVIDIA H200", "synchronize": lambda device: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(
        parts, "_said", lambda *command: "580.65" if command[0] == "nvidia-smi" else ""
    )
    monkeypatch.setattr(
        parts,
        "_attention_kernels",
        lambda device, queries, keys, *given: f"flash of {queries}, {keys}",
    )
    monkeypatch.setattr(parts, "_low_scores_have_gradients", lambda device, tokens: tokens == 704)
    compute_fp32_in_fp32()
    with FakeTensorMode():  # which has tensors of a GPU, without memory
        rows = {row.pop("name"): row for row in parts.facts(GPU, False)}
    assert rows["NVIDIA H200"]["value"].endswith(", driver 580.65")
    assert [row["ok"] for row in rows.values() if "ok" in row] == [True] * 5
    assert rows["kernel of cross attention"] == {"value": "flash of 20280, 512"}
    assert rows["taken by libraries since the first call"] == {"value": "3.00 GiB"}
    assert rows["in use before"]["value"].startswith("30.00 GiB")


def test_a_gpu_is_kept_busy_before_blocks_and_copies(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ditkit_core.engine.pinned_memory import CopyLane
    from gpu_late import Delay, late_copies

    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    delay, lane, block = Delay(GPU, 7), CopyLane(CPU), torch.nn.Identity()
    delay.pre_forward(0, block)
    delay.pre_backward(0, block)
    with late_copies(GPU, 7), lane.copies():
        assert slept == [7] * 3
    with late_copies(GPU, 0), lane.copies():
        assert len(slept) == 3
    with lane.copies():
        assert len(slept) == 3


def test_backwards_that_differ_are_seen(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_bits

    attend, enabled = gpu_bits.attend, list[bool]()

    def noisy(q: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        enabled.append(torch.are_deterministic_algorithms_enabled())
        return attend(q, *given, **named) * (1 + (len(enabled) == 4))

    assert gpu_bits.repeated(CPU, "sdpa", 16) == {
        "name": "deterministic sdpa, five backwards",
        "ok": True,
    }
    monkeypatch.setattr(gpu_bits, "attend", noisy)
    with gpu_bits.deterministic():
        assert gpu_bits.repeated(CPU, "sdpa", 16)["ok"] is False
    assert enabled == [True] * 5 and not torch.are_deterministic_algorithms_enabled()


def test_backwards_are_repeated_with_kernels_that_torch_promises(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `warn_only` flash keeps its atomic additions."""
    import gpu_bits

    modes = list[bool]()
    monkeypatch.setattr(gpu_bits, "_compared", lambda *given: iter(()))
    monkeypatch.setattr(gpu_bits, "_pipelined", lambda device: {"name": "pipelined"})

    def repeated(device: torch.device, backend: str, tokens: int) -> dict[str, Any]:
        modes.append(torch.is_deterministic_algorithms_warn_only_enabled())
        return {"name": "five backwards"}

    monkeypatch.setattr(gpu_bits, "repeated", repeated)
    assert [row["name"] for row in gpu_bits.bitwise(CPU, True)][-2:] == [
        "five backwards",
        "pipelined",
    ]
    assert modes == [False]


@pytest.mark.parametrize(("error", "within"), [(1.3e-4, True), (1.5e-3, False)])
def test_sums_of_fp8_may_be_cut_off_as_an_h100_does_but_not_as_in_its_fast_mode(
    parts: Any, error: float, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of random sums of 5,120 products, relative to their size. The gradient is of the same
    upstream gradient, so it differs by no more."""
    from ditkit_core.nn import eight_bit_products

    layer = parts.QuantizedLinear(512, 512, "fp8", bias=False)
    layer.set_weight(torch.randn(512, 512, generator=torch.Generator().manual_seed(0)))
    layer.in_8_bits = True
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact, sums, random = (
        parts._both_ways(layer, x),
        eight_bit_products._sums,
        torch.Generator().manual_seed(2),
    )

    def cut_off(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        wide = sums(left, right)
        return wide + error * wide.square().mean().sqrt() * torch.randn(
            wide.shape, generator=random
        )

    monkeypatch.setattr(eight_bit_products, "_sums", cut_off)
    (row,) = parts._computed(layer, x, exact, "torch")
    assert row["ok"] is within, row


def test_a_way_that_changes_a_bit_is_seen(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_bits

    class Careless(gpu_bits.BlockEngine):  # type: ignore[name-defined,misc]
        def __call__(self, *given: Any, **named: Any) -> Any:
            return [
                out * (1 + 2**-20) if self.policy == "full" else out
                for out in super().__call__(*given, **named)
            ]

    small = gpu_bits.Model(
        name="",
        make=lambda: gpu_bits._seeded(CPU, gpu_bits.ToyArch(depth=2)),
        backend="sdpa",
        steps=1,
        sleep=0,
    )
    ways = [
        gpu_bits.Way(policy="none"),
        gpu_bits.Way(policy="full"),
        gpu_bits.Way(policy="full", swap=True, late=True),
    ]
    assert all(row["ok"] for row in gpu_bits._compared(small, ways, CPU))
    monkeypatch.setattr(gpu_bits, "BlockEngine", Careless)
    assert [row["ok"] for row in gpu_bits._compared(small, ways, CPU)] == [True, False, False]


def test_gradients_that_are_not_finite_are_seen(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = parts.attend
    assert parts._low_scores_have_gradients(CPU, 192)
    monkeypatch.setattr(
        parts, "attend", lambda q, *given, **named: attend(q, *given, **named) * (q * torch.inf)
    )
    assert not parts._low_scores_have_gradients(CPU, 192)


def test_each_pass_over_memory_is_timed_and_its_gradients_found(parts: Any) -> None:
    import gpu_passes

    rows = {row["name"]: row for row in gpu_passes.passes(CPU, True)}
    assert (
        list(rows) == [f"{name}, torch" for name in gpu_passes.passes_of(CPU, 1, 128)]
        and len(rows) == 9
    )
    assert all(row["forward GB/s"] > 0 and row["host µs"] > 0 for row in rows.values())
    with_backward = {name for name, row in rows.items() if row.get("backward GB/s", 0) > 0}
    assert with_backward == {
        f"{name}, torch" for name in ("modulated norm", "modulated norm, trained",
        "norm and rotation", "gated unit", "gated sum")
    }  # fmt: skip
    made = gpu_passes.passes_of(CPU, 3, 128)
    sizes = {
        name: sorted(leaf.numel() for leaf in gpu_passes._leaves(made[name].run()))
        for name in ("modulated norm, trained", "gated sum")
    }
    assert sizes == {
        "modulated norm, trained": [128, 128, 3 * 128],
        "gated sum": [3 * 128, 3 * 128],
    }


def test_where_a_step_waits_is_what_torch_warns_of(
    parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_passes

    modes, to_host = list[str](), torch.Tensor.cpu

    def waited_for(tensor: torch.Tensor) -> torch.Tensor:
        if modes[-1:] == ["warn"]:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        return to_host(tensor)

    for name, value in {
        "set_sync_debug_mode": modes.append,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "cpu", waited_for)
    rows = list(gpu_passes.waits(CPU, parts._families(True)))
    assert [row["name"] for row in rows] == [
        f"toy, {kernels}: waits in a step" for kernels in ("torch", "triton")
    ]
    assert all(row["ok"] and row["value"].startswith("train_step.py:") for row in rows)
    assert modes == ["warn", "default"] * 6
    step = gpu_passes.training_step
    monkeypatch.setattr(
        gpu_passes,
        "training_step",
        lambda *given, **named: (torch.ones(1).cpu(), step(*given, **named)),
    )
    assert [row["ok"] for row in gpu_passes.waits(CPU, parts._families(True))] == [False, False]


@pytest.mark.parametrize("wrong", [None, torch.full((3,), torch.nan), torch.full((3,), torch.inf)])
@pytest.mark.parametrize("place", ["first", "second"])
def test_a_gradient_that_is_missing_or_not_finite_is_within_no_tolerance(
    parts: Any, place: str, wrong: Any
) -> None:
    right = {"first": torch.ones(3), "none": None, "second": torch.ones(3)}
    for distance in (parts._distance, parts._error):
        assert distance(right, right) == 0
        assert not distance({**right, place: wrong}, right) < 1e9


@pytest.mark.exhaustive  # the two families at 1,024 tokens
def test_gradients_of_both_families_are_compared_at_1024_tokens(parts: Any) -> None:
    found = {name: made for name, *made in parts._families(False)}
    assert list(found) == ["toy", "wan", "flux2"]
    for name, (spec, arch, items) in found.items():
        model: Any = make_model(spec, arch, dtype=torch.bfloat16, adapter=ADAPTERS["lora"])
        made = outcome(spec, model, items, parts._engines(CPU)["full"])
        assert torch.isfinite(made.loss) and any(
            each is not None for each in made.gradients.values()
        ), name
    assert parts._engines(GPU).keys() - parts._engines(CPU).keys() == {"kernels of Triton"}
