"""tools/bench/device_clock.py and the benchmarks on a GPU, with stand-ins for it: how they time,
what they count, and which sizes they take."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from workspace import ROOT


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))


class Event:
    """As torch.cuda.Event: notes what is asked of it."""

    log: ClassVar[list[str]] = []

    def __init__(self, *, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")

    def elapsed_time(self, end: "Event") -> float:
        return 250.0


def test_on_a_gpu_steps_are_timed_by_events_and_memory_is_what_a_step_adds(tools, monkeypatch):
    import torch

    import device_clock

    log = Event.log = []
    for name, value in {
        "Event": Event, "synchronize": lambda device: log.append("synchronize"), "memory_allocated": lambda device: 100,
        "reset_peak_memory_stats": lambda device: log.append("reset"), "max_memory_allocated": lambda device: 350,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    gpu = torch.device("cuda", 0)
    assert device_clock.seconds(lambda: log.append("step"), gpu) == 0.25
    assert log == ["synchronize", "record", "step", "record", "wait"]
    log.clear()
    assert device_clock.peak_bytes(lambda: log.append("step"), gpu) == 250
    assert log == ["synchronize", "reset", "step", "synchronize"]


def test_a_lack_of_memory_costs_one_row(tools, monkeypatch):
    import torch

    import bench_step
    import device_clock

    def lacking() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert device_clock.unless_out_of_memory(lacking) is None
    with pytest.raises(RuntimeError, match="another"):
        device_clock.unless_out_of_memory(lambda: (_ for _ in ()).throw(RuntimeError("another")))
    rows = bench_step.measured(
        {"ours": lambda: torch.ones(()), "theirs": lacking}, 2, torch.device("cpu")
    )
    assert rows["theirs"] == bench_step.Row(loss=None)
    assert rows["ours"].loss == 1.0 and rows["ours"].seconds is not None
    assert bench_step.ratio(rows["ours"], rows["theirs"]) == "-"


def test_kernels_are_recognised_by_their_names_and_gaps_by_their_times(tools):
    from device_clock import Launch, busy_and_span, by_kind, kind_of

    kinds = {
        "flash_fwd_kernel": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": "attention backward",
        "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(": "attention backward",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(": "attention", "nvjet_tst_128x256": "matmul",
        "ampere_sgemm_128x64": "matmul fp32",
        "Memcpy HtoD": "copy", "vectorized_elementwise_kernel": "elementwise",
    }  # fmt: skip
    assert {name: kind_of(name, on_gpu=True) for name in kinds} == kinds
    found = [
        Launch(name="", kind="copy", begin=a, end=b) for a, b in ((0, 4), (2, 3), (3, 6), (10, 11))
    ]
    assert busy_and_span(found) == (7, 11) and busy_and_span([]) == (0, 0)
    number, taken = by_kind(found)
    assert (number["copy"], taken["copy"]) == (4, 9)


def test_names_that_a_compiler_gives_to_spans_are_no_kernels(tools):
    import torch

    from device_clock import _is_kernel

    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    made = [
        ("gemm", cuda, False), ("Torch-Compiled Region: 0/0", cuda, True), ("aten::mm", cuda,
        False), ("other", cpu, False),
    ]  # fmt: skip
    events = [
        SimpleNamespace(name=name, device_type=kind, is_user_annotation=is_span)
        for name, kind, is_span in made
    ]
    assert [event.name for event in events if _is_kernel(event)] == ["gemm"]


def test_on_a_gpu_the_benchmarks_have_real_sizes_that_fit(tools, monkeypatch):
    import torch

    import bench_checkpointing
    import bench_step

    gpu = torch.device("cuda", 0)
    for module in (bench_step, bench_checkpointing):
        monkeypatch.setattr(
            module, "started_on", lambda name: gpu if name == "cuda" else torch.device(name)
        )
    wan, flux2 = (
        bench_step.configured(["--device", "cuda", "--model", model]) for model in ("wan", "flux2")
    )
    assert (wan.sizes, wan.dtypes, wan.width, wan.blocks, wan.rank) == (
        [20280],
        ["bf16"],
        5120,
        4,
        32,
    )
    assert (flux2.sizes, flux2.dtypes, flux2.width) == ([1024, 4096], ["bf16"], 6144)
    policies = []
    monkeypatch.setattr(
        bench_checkpointing, "measure", lambda args, device: policies.append(args.policies)
    )
    bench_checkpointing.main(["--device", "cuda"])
    bench_checkpointing.main([])
    fitting = ["attn_only", "attn_only(self)"]
    assert policies == [fitting, ["none", *fitting]], "none takes 200 GiB"


def test_frozen_matrices_are_in_8_bits_for_a_while(tools):
    import torch

    import bench_step
    from ditkit_core.nn.quantized_linear import quantized_weights
    from ditkit_core.testing.toy import TOY, ToyArch, toy_items
    from ditkit_core.testing.world import make_model, outcome

    model: Any = make_model(TOY, ToyArch(), dtype=torch.bfloat16).requires_grad_(False)
    before = outcome(TOY, model, toy_items(2), None)
    with bench_step.computed_in(model, "int8"):
        layers = quantized_weights(model).values()
        assert len(layers) == 12 and all(layer.in_8_bits for layer in layers)
        inside = outcome(TOY, model, toy_items(2), None)
    assert not quantized_weights(model) and outcome(TOY, model, toy_items(2), None).equals(before)
    assert 0 < abs(float(inside.loss - before.loss)) < 0.1 * float(before.loss)


def test_a_policy_for_which_memory_is_short_gets_dashes(tools, monkeypatch, capsys):
    import torch

    import bench_checkpointing

    def lacking(*given: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench_checkpointing, "build", lambda *given: (None, None))
    monkeypatch.setattr(bench_checkpointing, "measured", lacking)
    bench_checkpointing.measure(SimpleNamespace(policies=["none"]), torch.device("cpu"))  # type: ignore[arg-type]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    assert [row.count(" - ") for row in rows] == [10] * 3
