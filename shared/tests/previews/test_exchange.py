"""Previews of two experts on the device that trains one of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from preview_runs import FLAGS, check_equal, samples
from two_experts import BOUNDARY, TwoExperts

from ditkit_core.engine import parked_weights
from ditkit_core.previews import exchange

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

NAMES = ("high_noise", "low_noise")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoExperts:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # takes long, and nothing here is large
    return TwoExperts(tmp_path)


def train(world: TwoExperts, name: str, *flags: str) -> Path:
    """A run of two steps; its previews are compared, so all of its samples have the same prompt.
    The first of three sampled steps is the high-noise expert's."""
    sampled = ("--sample.captions", "1", "--sample.steps", "3")
    assert world.run("train", "--run.folder", name, "--train.steps", "2", *sampled, *flags) == 0
    return world.folder / name


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has a CPU's weights parked as a GPU's, and lists how many tensors were."""
    counts: list[int] = []

    def parked(found):
        for tensor in found:
            if not tensor.untyped_storage().resizable() and tensor.untyped_storage().nbytes():
                tensor.data = tensor.data.clone()  # of a file in memory, which a GPU's never are
        counts.append(len(found))
        return parked_weights.parked_tensors(found)

    monkeypatch.setattr(exchange, "parked", parked)
    return counts


def test_training_is_bitwise_what_it_is_without_and_both_take_their_steps(
    world: TwoExperts, moved: list[int]
) -> None:
    without = train(world, "without", *FLAGS)
    world.sampler.steps.clear()
    run = train(world, "with", *FLAGS, "--sample.every_steps", "1")
    assert len(moved) == 4, "two previews of each expert"
    for name in NAMES:
        check_equal(without / name, run / name)
        previews = [each for each in samples(run / name) if each.endswith(".png")]
        assert [each[:11] for each in sorted(previews)] == ["step-000000", "step-000001"]
        assert not samples_of(without, name)
    assert samples(without).keys() == samples(run).keys() != set()
    high = {
        float(weight.mean()) for _, level, weight, _ in world.sampler.steps if level >= BOUNDARY
    }
    low = {float(weight.mean()) for _, level, weight, _ in world.sampler.steps if level < BOUNDARY}
    assert not high & low and {guidance for *_, guidance in world.sampler.steps} == {4.0, 3.0}


def samples_of(run: Path, expert: str) -> list[Path]:
    return list((run / expert / "samples").glob("*.png"))


@pytest.mark.slow
def test_a_preview_has_the_first_expert_as_it_was_trained(
    world: TwoExperts, moved: list[int]
) -> None:
    """The second one's after its first step is the sample of a run that trained the first for two
    and the second for one step."""
    flags = ("--base.quantize", "int8")
    run = train(world, "run", *flags, "--sample.every_steps", "1")
    other = train(world, "other", *flags, "--experts.steps", "[2, 1]")
    assert moved
    (sample,) = (other / "samples").glob("step-000002-0-*.png")
    (preview,) = (run / "low_noise" / "samples").glob("step-000001-0-*.png")
    assert preview.read_bytes() == sample.read_bytes()


@pytest.mark.parametrize(
    "flags",
    [("--adapter.method", "full"), ("--train.swap_blocks", "1"), ("--experts.train", "low_noise")],
    ids=["full", "streamed", "one"],
)
@pytest.mark.slow
def test_other_runs_are_bitwise_the_same_too(
    world: TwoExperts, moved: list[int], flags: tuple[str, ...]
) -> None:
    without = train(world, "without", *flags, "--ema.decay", "0.5")
    run = train(world, "with", *flags, "--ema.decay", "0.5", "--sample.every_steps", "1")
    assert moved
    for name in ("",) if "--experts.train" in flags else NAMES:
        check_equal(without / name, run / name)


def test_without_the_other_expert_there_are_none(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        "--experts.train",
        "high_noise",
        "--model.transformer_2",
        "",
        "--sample.every_steps",
        "1",
    )
    run = train(world, "run", *flags)
    assert (
        "no previews of the high_noise expert: sampling needs all experts"
        in capsys.readouterr().err
    )
    assert not list((run / "samples").glob("*.png"))


def test_a_host_without_room_costs_the_previews_alone(
    world: TwoExperts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchange, "parked_bytes", lambda weights: 2**31)
    monkeypatch.setattr(exchange, "free_memory_bytes", lambda device: 2**30)
    train(world, "run", "--sample.every_steps", "1")
    assert (
        capsys.readouterr().err.count("the host needs 2.0 GiB and has 1.0 GiB; set sample.device")
        == 2
    )


@pytest.mark.parametrize(
    ("asked", "num"),
    [
        ([("a", 3, 8), ("a", 3, 8)], 2),
        ([("a", 3, 8), ("a", 3, 8), ("a", 3, 8)], 2),
        ([("a", 3, 4), ("a", 3, 4), ("b", 3, 9)], 1),
        ([("a", 3, 4), ("b", 3, 4), ("b", 3, 4)], 2),
        ([("a", 3, 2), ("b", 3, 9)], 0),
        ([("a", 0, 0), ("a", 0, 0)], 2),
    ],
)
def test_as_many_ranks_exchange_experts_as_their_hosts_have_room_for(
    asked: list[tuple[str, int, int]], num: int
) -> None:
    """The first ones: with room for one alone, the first rank generates all previews."""
    assert (
        exchange.num_with_room(
            [{"host": host, "needed": needed, "free": free} for host, needed, free in asked]
        )
        == num
    )


def planned(
    world: TwoExperts, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = world.run(
        "train", "--sample.captions", "1", "--json", "--plan", "--gpus", "24GiB", *flags
    )
    return status, json.loads(capsys.readouterr().out)


def exchanged(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["auxiliary"] if row["name"] == "exchange of the experts"]


@pytest.mark.parametrize("streamed", [0, 1])
def test_a_plan_counts_what_waits_on_the_host(
    world: TwoExperts, capsys: pytest.CaptureFixture[str], streamed: int
) -> None:
    flags = ("--train.swap_blocks", str(streamed), "--sample.every_steps")
    status, found = planned(world, capsys, *flags, "1")
    (device,), host, (row,) = found["devices"], found["host"], exchanged(found)
    assert (
        status == 0 and found["previews"] and row["stage"] == "preview" and row["available"] is None
    )
    assert row["weights"] == device["weights"] + device["adapters"] + host["streamed_weights"] > 0
    assert row["peak"] - row["weights"] == row["in_use"] == host["streamed_weights"]
    assert not exchanged(planned(world, capsys, *flags, "0")[1])


def test_a_host_without_room_for_previews_still_has_room_to_train(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    """So no other settings are searched: what lacks are the previews, and the remedy is theirs."""
    flags = ("--train.swap_blocks", "1", "--sample.every_steps", "1")
    _, without_limit = planned(world, capsys, *flags)
    streamed, (row,) = without_limit["host"]["streamed_weights"], exchanged(without_limit)
    host = ("--host", f"{(streamed + row['peak']) / 2**31:.9f}GiB")  # between both
    status, found = planned(world, capsys, *flags, *host)
    assert status == 3 and not found["fits"] and found["host"]["missing"] == 0
    assert [(each["name"], each["fits"]) for each in found["auxiliary"] if not each["fits"]] == [
        (row["name"], False)
    ]
    assert (
        world.run("train", "--sample.captions", "1", "--plan", "--gpus", "24GiB", *flags, *host)
        == 3
    )
    said = capsys.readouterr().out
    assert (
        "preview: exchange of the experts does not fit host; name another GPU as sample.device"
        in said
    )
    assert "--fit" not in said


def test_a_plan_counts_the_rows_of_a_rank_where_ranks_divide_the_experts(
    world: TwoExperts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the blocks that it gathers for a forward."""
    ranks = ("--nproc", "2", "--train.accumulation", "2", "--sample.every_steps", "1")
    whole, divided = (
        exchanged(planned(world, capsys, *ranks, "--ranks.shard", str(shard))[1])[0]["weights"]
        for shard in (1, 2)
    )
    assert whole / 2 <= divided < 0.55 * whole, "rows that do not divide are rounded up"
