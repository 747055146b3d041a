"""Models divided over devices: where the cuts fall, and runs that do not notice."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from toy_world import World, equal

from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.planner.memory import Budget, DeviceSpan, Profile, StageCost
from ditkit_core.planner.partition import choose_split_points, divide_blocks, weights_profile
from ditkit_core.testing.pretend_devices import PretendDevices
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model

EVEN = [1, 1]
CPU, OTHER, THIRD = (torch.device(name) for name in ("cpu", "cpu:1", "cpu:2"))


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def loads(block_bytes, before=0, after=0, passes=None, arriving=None):
    """Stages with what stays on their device, what passes while they run, and what arrives with the
    carry that enters them."""
    passing = passes or [0] * len(block_bytes)
    blocks = tuple(
        StageCost(weights=w, forward_extra=most)
        for w, most in zip(block_bytes, passing, strict=True)
    )
    nothing = (0,) * len(blocks)
    return Profile(
        embed=StageCost(weights=before), blocks=blocks, head=StageCost(weights=after),
        crossing=(*(arriving or nothing), 0), crossing_back=(*nothing, 0),
    )  # fmt: skip


def budgets(capacities):
    return [
        Budget(name=str(index), total=size, workspace=0) for index, size in enumerate(capacities)
    ]


def balanced_cuts(given, capacities):
    return choose_split_points(given, budgets(capacities))


def fullness(given, gpus, device, start, end):
    return DeviceSpan(given, start, end).plan(gpus[device]).peak / gpus[device].total


def fullest(given, cuts, capacities):
    """Written again and differently: how full the fullest device is."""
    bounds = [0, *cuts, len(given.blocks)]
    shares = []
    for device, (a, b) in enumerate(itertools.pairwise(bounds)):
        held = list(given.blocks[a:b])
        held += [given.embed] if device == 0 else []
        held += [given.head] if b == len(given.blocks) else []
        total = max(stage.forward_extra for stage in held)
        for stage in held:
            total += stage.weights
        if device:
            total += given.crossing[a]
        shares.append(total / capacities[device])
    return max(shares)


def test_blocks_that_weigh_twice_as_much_move_the_cut():
    """FLUX.2 dev: eight double blocks weigh what sixteen single ones do; upstream's midpoint of the
    single blocks is 24."""
    double, single = 2, 1
    (cut,) = balanced_cuts(loads([double] * 8 + [0] + [single] * 48), EVEN)
    assert cut - 9 == 16
    assert balanced_cuts(loads([1] * 40), EVEN) == (20,)
    assert balanced_cuts(loads([1] * 40, before=4), EVEN) == (18,)


def test_a_gpu_of_half_the_size_gets_half_the_blocks():
    assert balanced_cuts(loads([1] * 30), [16, 8]) == (20,)
    assert balanced_cuts(loads([1] * 30), [8, 16]) == (10,)
    assert balanced_cuts(loads([1] * 40), [24, 24, 16, 16]) == (12, 24, 32)


def test_what_passes_counts_once_on_a_device_and_what_arrives_where_it_does():
    """A stage that needs much only while it runs leaves its device with fewer blocks, once."""
    assert balanced_cuts(loads([1] * 20, passes=[6] + [0] * 19), EVEN) == (7,)
    assert balanced_cuts(loads([1] * 20, passes=[6] * 10 + [0] * 10), EVEN) == (10,)
    assert balanced_cuts(loads([1] * 20, arriving=(4,) * 20), EVEN) == (12,)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_no_other_cuts_leave_the_fullest_device_less_full(num_devices):
    random = torch.Generator().manual_seed(num_devices)

    def draw(low, high, count):
        return [int(n) for n in torch.randint(low, high, (count,), generator=random)]

    for _ in range(20):
        given = loads(
            draw(1, 50, 9),
            before=20,
            after=7,
            passes=draw(0, 60, 9),
            arriving=tuple(draw(0, 20, 9)),
        )
        capacities = draw(1, 8, num_devices)
        cuts = balanced_cuts(given, capacities)
        assert len(cuts) == num_devices - 1
        every = itertools.combinations(range(1, 9), num_devices - 1)
        assert fullest(given, cuts, capacities) == min(
            fullest(given, other, capacities) for other in every
        )
        starts = [0, 1, 3, 4, 6, 8]
        some = itertools.combinations(starts[1:], num_devices - 1)
        cost = partial(fullness, given, budgets(capacities))
        ((least, cuts),) = divide_blocks(9, num_devices, starts, cost)
        assert set(cuts) <= set(starts)
        assert (
            least
            == fullest(given, cuts, capacities)
            == min(fullest(given, other, capacities) for other in some)
        )


def test_a_device_too_small_for_anything_holds_one_block():
    """Who names a GPU wants it used, and leaves it out by not naming it."""
    assert balanced_cuts(loads([10] * 6), [1, 1000, 1]) == (1, 5)


class Joined(nn.Module):
    """Two blocks, one without parameters, two blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 1), nn.Linear(1, 1)
        self.layers = nn.ModuleList(
            [nn.Linear(2, 2), nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2), nn.Linear(2, 2)]
        )

    def blocks(self):
        return list(self.layers)


def chosen(model, num_devices):
    """The cuts of a model by its weights, for devices alike."""
    return balanced_cuts(weights_profile(model, TOY, Precision()), [1] * num_devices)


def test_no_device_begins_with_a_block_without_parameters():
    """It runs where its carry is: a placement that said otherwise would not say what happens."""
    model = Joined()
    for cuts in (chosen(model, 2), (2,), (3,)):
        assert place_blocks(model, (CPU, OTHER), cuts).split_points == (3,)
    for cuts in ((2, 3), (1, 1), (3, 3)):
        with pytest.raises(UserError, match="increasing"):
            place_blocks(model, (CPU, OTHER, THIRD), cuts)
    with pytest.raises(UserError, match="name fewer"):
        chosen(model, 5)


def test_a_parameter_outside_the_stages_has_no_device():
    model = Joined()
    model.table = nn.Parameter(torch.zeros(3))
    device_of = place_blocks(model, (CPU, OTHER), (3,)).device_of(model)
    with pytest.raises(LookupError, match="table belongs neither"):
        device_of("table")


def test_a_parameter_goes_where_its_stage_is():
    model = make_model(TOY, ToyArch(depth=3))
    device_of = place_blocks(model, (CPU, OTHER), (2,)).device_of(model)
    found = {
        name: device_of(name)
        for name in ("embed.patch.weight", "layers.1.out", "layers.2.out", "head.out.weight")
    }
    assert list(found.values()) == [CPU, CPU, OTHER, OTHER]


@pytest.mark.parametrize(
    ("devices", "cuts", "says"),
    [
        ((CPU, OTHER), (0,), "below 2"),
        ((CPU, OTHER), (2,), "below 2"),
        ((CPU, OTHER), (-1,), "below 2"),
        ((CPU, OTHER), (1, 1), "2 devices need 1"),
        ((CPU,), (1,), "names one"),
        ((CPU, OTHER, THIRD), None, "name fewer"),
    ],
)
def test_cuts_that_divide_nothing_are_refused(devices, cuts, says):
    with pytest.raises(UserError, match=says) as error:
        model = make_model(TOY, ToyArch(depth=2))
        place_blocks(model, devices, chosen(model, len(devices)) if cuts is None else cuts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "policy",
    [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("none", "full")), "attn_only"],
)
def test_a_run_over_two_devices_equals_one_on_one_bitwise(world, capsys, policy):
    flags = (
        "--held_out.clips",
        "1",
        "--ema.decay",
        "0.9",
        "--train.checkpointing",
        policy,
        "--train.accumulation",
        "2",
    )
    assert world.train("one", 2, *flags) == 0
    capsys.readouterr()
    with PretendDevices():
        assert world.train("two", 2, "--train.devices", '["cpu", "cpu:1"]', *flags) == 0
    said = capsys.readouterr().out
    assert "split over 2 devices: cpu blocks 0 to 0, cpu:1 blocks 1 to 1" in said
    assert "validation loss" in said
    assert equal(world.adapter("one"), world.adapter("two"))
    pictures = [sorted((world.folder / name / "samples").glob("*.png")) for name in ("one", "two")]
    assert [a.read_bytes() for a in pictures[0]] == [b.read_bytes() for b in pictures[1]] != []


def test_a_run_is_continued_under_another_division_bitwise(world):
    flags = ("--adapter.method", "full", "--sample.captions", "0", "--model.preset", "tiny")
    assert world.train("whole", 3, *flags) == 0
    assert world.train("parts", 1, *flags) == 0
    with PretendDevices():
        assert world.train("parts", 2, "--train.devices", '["cpu", "cpu:1"]', *flags) == 0
    assert world.train("parts", 3, *flags) == 0
    exports = [
        world.folder / name / "exports" / "transformer_official" for name in ("whole", "parts")
    ]
    files = [next(export.rglob("*.safetensors")) for export in exports]
    from safetensors.torch import load_file

    assert equal(*(load_file(file) for file in files))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--train.devices", '["cpu", "cpu"]'), "twice"),
        (("--train.devices", '["cpu"]', "--train.device", "cpu"), "leave one of them out"),
        (("--train.devices", '["cpu", "warp"]'), "is not a device"),
        (("--train.split_points", "[1]"), "names one"),
        (("--train.devices", '["all", "cpu"]'), "means every GPU"),
        (("--train.reserve", "[1.0, 2.0]"), "2 numbers for 1 devices"),
        (
            ("--train.devices", '["cpu", "cpu:1"]', "--train.split_points", "[2]"),
            "below 2, the model's number of blocks",
        ),
    ],
)
def test_devices_that_make_no_sense_are_one_line(world, capsys, flags, says):
    assert world.train("run", 1, *flags) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
