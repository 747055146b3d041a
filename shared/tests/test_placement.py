"""Models divided over devices: where the cuts fall, and runs that do not notice."""

import itertools

import pytest
import torch

from ditkit_core.errors import UserError
from ditkit_core.placement import balanced_cuts, place
from ditkit_core.testing.second_device import second_device
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model
from toy_world import World, equal

CPU, OTHER, THIRD = (torch.device(name) for name in ("cpu", "cpu:1", "cpu:2"))


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def fullest(block_bytes, cuts, before=0, after=0):
    bounds = [0, *cuts, len(block_bytes)]
    held = [sum(block_bytes[a:b]) for a, b in itertools.pairwise(bounds)]
    held[0] += before
    held[-1] += after
    return max(held)


def test_blocks_that_weigh_twice_as_much_move_the_cut():
    """FLUX.2 dev: eight double blocks weigh what sixteen single ones do; upstream's midpoint of the single blocks is 24."""
    double, single = 2, 1
    (cut,) = balanced_cuts([double] * 8 + [0] + [single] * 48, 2)
    assert cut - 9 == 16
    assert balanced_cuts([1] * 40, 2) == (20,)
    assert balanced_cuts([1] * 40, 2, before=4) == (18,)


def test_no_other_cuts_leave_the_fullest_device_less_full():
    from itertools import combinations

    random = torch.Generator().manual_seed(0)
    for num_devices in (1, 2, 3, 4):
        sizes = [int(n) for n in torch.randint(1, 50, (9,), generator=random)]
        cuts = balanced_cuts(sizes, num_devices, before=20, after=7)
        assert len(cuts) == num_devices - 1
        every = combinations(range(1, len(sizes)), num_devices - 1)
        assert fullest(sizes, cuts, 20, 7) == min(fullest(sizes, other, 20, 7) for other in every)


def test_a_parameter_goes_where_its_stage_is():
    model = make_model(TOY, ToyArch(depth=3))
    device_of = place(model, (CPU, OTHER), (2,)).device_of(model)
    found = {
        name: device_of(name) for name in ("embed.patch.weight", "layers.1.out", "layers.2.out", "head.out.weight")
    }
    assert list(found.values()) == [CPU, CPU, OTHER, OTHER]


@pytest.mark.parametrize(
    ("devices", "cuts", "says"),
    [
        ((CPU, OTHER), (0,), "below 2"),
        ((CPU, OTHER), (2,), "below 2"),
        ((CPU, OTHER), (1, 1), "2 devices need 1"),
        ((CPU,), (1,), "names one"),
        ((CPU, OTHER, THIRD), (), "name fewer"),
    ],
)
def test_cuts_that_divide_nothing_are_refused(devices, cuts, says):
    with pytest.raises(UserError, match=says) as error:
        place(make_model(TOY, ToyArch(depth=2)), devices, cuts)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", ["none", "full", "attn_only"])
def test_a_run_over_two_devices_equals_one_on_one_to_the_bit(world, capsys, policy):
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
    assert world.train("one", 3, *flags) == 0
    capsys.readouterr()
    with second_device():
        assert world.train("two", 3, "--train.devices", '["cpu", "cpu:1"]', *flags) == 0
    said = capsys.readouterr().out
    assert "divided over 2 devices: cpu blocks 0 to 0, cpu:1 blocks 1 to 1" in said
    assert "held-out loss" in said
    assert equal(world.adapter("one"), world.adapter("two"))
    pictures = [sorted((world.folder / name / "samples").glob("*.png")) for name in ("one", "two")]
    assert [a.read_bytes() for a in pictures[0]] == [b.read_bytes() for b in pictures[1]] != []


def test_a_run_is_continued_under_another_division_to_the_bit(world):
    flags = ("--adapter.method", "full", "--sample.captions", "0", "--model.preset", "tiny")
    assert world.train("whole", 4, *flags) == 0
    assert world.train("parts", 2, *flags) == 0
    with second_device():
        assert world.train("parts", 3, "--train.devices", '["cpu", "cpu:1"]', *flags) == 0
    assert world.train("parts", 4, *flags) == 0
    files = [next((world.folder / name / "exports").rglob("*.safetensors")) for name in ("whole", "parts")]
    from safetensors.torch import load_file

    assert equal(*(load_file(file) for file in files))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--train.devices", '["cpu", "cpu"]'), "twice"),
        (("--train.devices", '["cpu"]', "--train.device", "cpu"), "leave one of them out"),
        (("--train.devices", '["cpu", "warp"]'), "no device"),
        (("--train.cuts", "[1]"), "names one"),
    ],
)
def test_devices_that_make_no_sense_are_one_line(world, capsys, flags, says):
    assert world.train("run", 1, *flags) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
