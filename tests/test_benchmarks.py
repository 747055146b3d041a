"""tools/bench/bench_step.py, bench_checkpointing.py and plan_truth.py on a model that costs
nothing: what is compared, and that each row is there at once."""

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workspace import MODELS, ROOT

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))


def test_every_family_can_be_timed() -> None:
    import bench_step

    assert bench_step.PAIRS.keys() == {member.package.removeprefix("ditkit_") for member in MODELS}


@pytest.mark.slow  # a model of each family, and diffusers' of it
@pytest.mark.parametrize("member", MODELS, ids=lambda member: member.package)
def test_what_is_timed_is_the_same_step(member: Any) -> None:
    import bench_step

    model = member.package.removeprefix("ditkit_")
    args = bench_step.configured(["--model", model, "--tiny", "--dtype", "fp32"])
    steps = bench_step.steps_of(args, bench_step.PAIRS[model](args, torch.float32), torch.float32)
    assert float(steps.ours()) == pytest.approx(float(steps.theirs()), rel=1e-4)


class Terminal(io.StringIO):
    """Shows what was flushed: the rest is lost if the process is killed."""

    shown = ""

    def flush(self) -> None:
        self.shown = self.getvalue()


def lacking(*given: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def small_pair(predict: Callable[[str], Tensor], target: Tensor) -> Any:
    """A pair of models whose predictions are `predict("ours")` and `predict("theirs")`."""
    import bench_step

    return bench_step.Pair(
        ours=nn.Identity(),
        theirs=nn.Identity(),
        predict=lambda engine: predict("ours"),
        their_predict=lambda: predict("theirs"),
        target=target,
        shape="small",
    )


def test_diffusers_is_timed_in_its_own_dtypes_and_under_autocast() -> None:
    """Training scripts run it under autocast; without it the products of its LoRA are in fp32."""
    import bench_step

    weight, x, seen = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2), list[torch.dtype]()

    def predict(name: str) -> Tensor:
        out = x @ weight
        seen.append(out.dtype)
        return out

    args = bench_step.configured(["--tiny", "--checkpointing", "none"])
    steps = bench_step.steps_of(args, small_pair(predict, torch.zeros(1, 2)), torch.bfloat16)
    assert [float(step()) for step in (steps.ours, steps.theirs, steps.autocast)] == [4.0] * 3
    assert seen == [torch.float32, torch.float32, torch.bfloat16]


def test_each_size_is_shown_before_the_next_is_measured_and_lacks_memory_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory is short for the models of the first size, for diffusers' steps of the second, and for
    nothing of the third. In fp32 autocast changes nothing, and is left out."""
    import bench_step

    terminal, shown = Terminal(), list[str]()

    def made(args: Any, dtype: torch.dtype) -> Any:
        shown.append(terminal.shown.rpartition("repeats\n")[2])
        weight = torch.ones((), requires_grad=True)
        short = {64: "theirs", 1024: ""}.get(args.tokens)
        if short is None:
            lacking()
        return small_pair(lambda name: lacking() if name == short else weight * 1, torch.zeros(()))

    monkeypatch.setitem(bench_step.PAIRS, "wan", made)
    monkeypatch.setattr(bench_step, "floor_share", lambda step, device: 0.5)
    monkeypatch.setattr(bench_step, "peak_bytes", lambda step, device: 1)
    args = bench_step.configured(["--tiny", "--checkpointing", "none"])
    args.sizes, args.dtypes = [256, 64, 1024], ["bf16"]
    monkeypatch.setattr(bench_step, "configured", lambda given: args)
    with redirect_stdout(terminal):
        bench_step.main([])
    rows = terminal.shown.splitlines()[1:]
    assert [len(each.splitlines()) for each in shown] == [0, 1, 2]
    assert rows[0].endswith("tokens 256 bf16 none: out of memory")
    assert (
        ", diffusers -, diffusers in autocast -; ratio - of diffusers, - of diffusers in autocast, "
        "floor/diffusers - " in rows[1]
    )
    assert rows[1].endswith("losses 1.00000 / - / -")
    assert rows[2].endswith("losses 1.00000 / 1.00000 / 1.00000") and "ratio -" not in rows[2]
    args.sizes, args.dtypes = [1024], ["fp32"]
    with redirect_stdout(terminal):
        bench_step.main([])
    assert "autocast" not in terminal.shown.splitlines()[-1]


def test_a_busy_machine_is_timed_in_pairs_of_processor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pair has its own ratio, whatever slows one pair down, and neither is always first."""
    import bench_step

    clock, order = [0.0], list[str]()
    taken = {"ours": iter([9, 1, 9, 80, 6]), "theirs": iter([9, 2, 10, 100, 10])}

    def predict(name: str) -> Tensor:
        order.append(name)
        clock[0] += next(taken[name])
        return torch.ones((), requires_grad=True)

    monkeypatch.setattr(bench_step.time, "process_time", lambda: clock[0])
    args = bench_step.configured(["--tiny", "--clock", "processor", "--checkpointing", "none"])
    steps = bench_step.steps_of(args, small_pair(predict, torch.zeros(())), torch.float32)
    text = bench_step.in_pairs(steps, 4)
    assert order == ["ours", "theirs"] * 2 + ["theirs", "ours", "ours", "theirs", "theirs", "ours"]
    # The first pair, which allocates, is left out: 0.5, 0.9, 0.8 and 0.6.
    assert text == (
        "ours 7500 ms, diffusers 10000 ms of processor time; ratio in pairs 0.700 (0.575 to 0.825)"
    )


def test_each_policy_is_shown_before_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_checkpointing

    terminal, shown = Terminal(), list[int]()

    def measured(model: Any, step: Any, policy: str, *given: Any) -> Any:
        shown.append(terminal.shown.count("\n| `"))
        return lacking()

    monkeypatch.setattr(bench_checkpointing, "build", lambda *given: (None, None))
    monkeypatch.setattr(bench_checkpointing, "measured", measured)
    with redirect_stdout(terminal):
        bench_checkpointing.measure(SimpleNamespace(policies=["none"]), CPU)  # type: ignore[arg-type]
    assert shown == [0, 1, 2]


def test_a_gradient_that_is_not_a_number_is_shown() -> None:
    import bench_checkpointing

    def found(*gradients: float) -> Any:
        return SimpleNamespace(
            seconds=1.0, of_full=1.0, counts={}, peak=0, loss=1.0,
            gradients={str(place): torch.tensor([value]) for place, value in enumerate(gradients)},
        )  # fmt: skip

    rows = [
        bench_checkpointing.row("full", found(1.0, *last), found(1.0, 2.0))
        for last in ([2.5], [float("nan")])
    ]
    assert [each.rpartition("|")[0].rpartition("|")[2].strip() for each in rows] == ["0.25", "nan"]


def test_each_plan_is_shown_before_the_next_and_measured_with_the_allocator_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import plan_truth
    from ditkit_core.io.allocator import allocator_settings

    terminal, shown, environments = Terminal(), list[int](), list[dict[str, str]]()

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        shown.append(terminal.shown.count("\n| wan"))
        environments.append(env)
        return SimpleNamespace(returncode=0, stdout='{"peak": 100}\n')

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plan_truth.subprocess, "run", run)
    monkeypatch.setattr(plan_truth, "plan", lambda case, device: 100)
    monkeypatch.setattr(sys, "argv", ["plan_truth.py", "--tiny"])
    with redirect_stdout(terminal):
        assert plan_truth.main() == 0
    assert shown == [0, 1]
    assert all(
        allocator_settings({}).items() <= environment.items() for environment in environments
    )


def test_they_measure_with_the_device_current_and_the_arithmetic_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import device_clock
    import plan_truth

    gpu, current, matmul = torch.device("cuda", 1), list[torch.device](), torch.backends.cuda.matmul

    def stop(case: Any) -> Any:
        raise InterruptedError

    def measure() -> None:
        with pytest.raises(InterruptedError):
            plan_truth.measure(plan_truth.tiny_cases()[0], gpu)

    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(device_clock, "choose_device", lambda name, key: torch.device(name))
    monkeypatch.setattr(plan_truth, "described", stop)
    for start in (lambda: device_clock.started_on("cuda:1"), measure):
        current.clear()
        torch.backends.cudnn.allow_tf32 = matmul.allow_bf16_reduced_precision_reduction = True
        start()
        assert current == [gpu]
        assert (
            not torch.backends.cudnn.allow_tf32
            and not matmul.allow_bf16_reduced_precision_reduction
        )


@pytest.mark.parametrize(("model", "preset"), [("wan", "t2v-1.3b"), ("flux2", "dev")])
def test_a_published_model_is_compared_with_diffusers_in_its_own_dtype(
    model: str, preset: str
) -> None:
    """Made in bf16, both have the values that the rounding of bf16 leaves apart, and guidance where
    the model embeds it."""
    import bench_step

    losses = {}
    for dtype in (torch.float32, torch.bfloat16):
        args = bench_step.configured(["--tiny", "--model", model, "--preset", preset])
        steps = bench_step.steps_of(args, bench_step.PAIRS[model](args, dtype), dtype)
        losses[dtype] = float(steps.ours()), float(steps.theirs())
    assert losses[torch.float32][0] == pytest.approx(losses[torch.float32][1], rel=1e-5)
    assert losses[torch.bfloat16][0] == pytest.approx(losses[torch.bfloat16][1], rel=2e-3)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--preset", "dev"], "none of --model wan: t2v-1.3b, t2v-14b, t2v-a14b"),
        (["--preset", "t2v-14b", "--blocks", "4"], "leave out --width and --blocks"),
        (["--checkpointing", "ful"], "did you mean full?"),
    ],
)
def test_a_preset_or_policy_that_does_not_fit_is_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import bench_step

    with pytest.raises(SystemExit):
        bench_step.configured(given)
    assert message in capsys.readouterr().err


def test_policies_are_compared_at_a_size_with_an_adapter_or_all_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_checkpointing

    small = ["--tiny", "--repeats", "1", "--blocks", "1", "--policies", "none", "attn_only"]
    small += ["--size", "64x96", "--frames", "5"]
    bench_checkpointing.main(small)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| `")
    ]
    assert [row[0] for row in rows] == ["`full`", "`none`", "`attn_only`", "`full, again`"]
    assert [row[1] for row in rows] == ["4", "2", "2", "4"], "attention runs once without recompute"
    assert rows[-1][-2:] == ["0", "0"], "no noise on a CPU"
    trained = []

    def measured(model: torch.nn.Module, step: Any, policy: str, *given: Any) -> None:
        assert step(policy).isfinite()
        trained.append({name for name, p in model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(bench_checkpointing, "measured", measured)
    bench_checkpointing.main([*small, "--trained", "full"])
    assert "1 blocks, 48 tokens, bf16, all weights trained" in capsys.readouterr().out
    assert len(trained) == 4 and all("layers.0.ffn.0.weight" in names for names in trained)
    for wrong in (["--size", "100x96"], ["--size", "64"], ["--frames", "50"]):
        with pytest.raises(SystemExit):
            bench_checkpointing.main([*small, *wrong])
    said = capsys.readouterr().err
    assert (
        "'100x96' is not HEIGHTxWIDTH in multiples of 16 pixels" in said
        and "'50' is not 1 more than" in said
    )


@pytest.mark.slow
def test_the_hosts_time_is_measured_of_every_block_without_a_gpu():
    """In a process of its own: it loads a CUDA driver that does nothing."""
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "tools" / "bench" / "bench_host_time.py", "--repeats", "1"]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300
    ).stdout
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in printed.splitlines()
        if "Block |" in line
    ]
    assert [name for name, *_ in rows] == ["WanBlock", "Flux2DoubleBlock", "Flux2SingleBlock"]
    for _, *times, ratio in rows:
        ours, by_triton, theirs = (
            sum(float(part.replace(",", "")) for part in cell.split(" + ")) for cell in times
        )
        assert min(ours, by_triton, theirs) > 0 and float(ratio) == pytest.approx(
            ours / theirs, abs=0.01
        )
