"""Which block runs under which policy, as a person writes it."""

import pytest
import torch

from ditkit_core.engine.ac_schedule import ACSchedule, parse_policy, parse_schedule
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import TrainConfig

FOUR = [
    torch.device("cpu", 1),
    torch.device("cpu", 1),
    torch.device("cpu", 2),
    torch.device("cpu", 2),
]


def policies(text, devices=FOUR):
    return [str(policy) for policy in parse_schedule(text).policies(devices)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", ["full"] * 4),
        ("offload", ["full+offload"] * 4),
        ("attn_only( self )+offload", ["attn_only(self)+offload"] * 4),
        ("full, 1-2=none", ["full", "none", "none", "full"]),
        ("0=none, 1-=attn_only(self, cross)", ["none", *["attn_only(self, cross)"] * 3]),
        ("cpu:1=full, cpu:2=none+offload", ["full", "full", "none+offload", "none+offload"]),
        ("every_n(2)", ["full", "none", "full", "none"]),
        (
            "attn_only, 1-3=every_n(2)+offload",
            ["attn_only", "full+offload", "none", "full+offload"],
        ),
    ],
)
def test_a_schedule_says_each_blocks_policy(text, expected):
    assert policies(text) == expected


@pytest.mark.parametrize(
    "text", ["full", "full, 1-2=none", "0-1=attn_only(self)+offload, 2-3=none", "every_n(3)"]
)
def test_what_is_written_of_policies_means_the_same(text):
    chosen = parse_schedule(text).policies(FOUR)
    assert parse_schedule(str(ACSchedule.of_blocks(chosen))).policies(FOUR) == chosen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("offload,0-1 = attn_only( self ,cross)", "full+offload, 0-1=attn_only(self, cross)"),
        ("attn_only, 1-3=every_n(2)+offload", "attn_only, 1-3=every_n(2)+offload"),
        ("cpu:1=attn_only(self, cross), cpu:2=none", "cpu:1=attn_only(self, cross), cpu:2=none"),
        ("budget", "budget"),
        ("budget( 20GiB,12GiB )", "budget(20GiB, 12GiB)"),
    ],
)
def test_the_text_of_a_schedule_is_read_as_the_same_schedule(text, expected):
    schedule = parse_schedule(text)
    assert str(schedule) == expected and parse_schedule(expected) == schedule


def test_a_configurations_schedule_is_the_value_that_an_engine_runs():
    config = TrainConfig(checkpointing="full,0=none")
    assert config.checkpointing == "full,0=none"  # stored as it was written
    assert BlockEngine(policy=config.schedule).schedule is config.schedule is config.schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "atn_only",
            "train.checkpointing = 'atn_only': unknown policy 'atn_only'; did you mean attn_only?",
        ),
        ("", "is not a policy; write none, full"),
        ("full(2)", "full takes nothing in parentheses"),
        ("every_n", "every_n takes a number of at least 2; write every_n(2)"),
        ("every_n(1)", "every_n takes a number of at least 2"),
        ("full, none", "the policy for all other blocks comes first, and only once"),
        ("0-1=none, full", "the policy for all other blocks comes first"),
        ("budget, 0=none", "budget chooses for all blocks; write nothing else next to it"),
        ("full+ofload", "is not a policy"),
        ("full)", "is not a policy"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(text, message):
    with pytest.raises(UserError) as refused:
        parse_schedule(text)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(UserError):
        BlockEngine(policy=text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-1=none", "has no policy for block 2"),
        ("full, 0-1=none, 1=full", "block 1 has two policies"),
        ("full, 3-4=none", "blocks 3-4 are not among the model's 4, 0 to 3"),
        ("full, 2-1=none", "blocks 2-1 are not among the model's 4"),
        ("full, cuda:0=none", "no block runs on cuda:0; the devices are cpu:1, cpu:2"),
        ("budget", "a plan must resolve it"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_in_one_line(text, message):
    with pytest.raises(UserError) as refused:
        policies(text)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_budget_names_sizes():
    assert parse_schedule("budget").budget == ()
    assert parse_schedule("budget(20GiB, 12GiB)").budget == ("20GiB", "12GiB")
    with pytest.raises(UserError):
        parse_policy("every_n(2), 0=none")


def test_a_schedule_by_devices_of_the_training_is_no_obstacle_without_a_backward():
    """A run that was trained on two GPUs is sampled on a CPU."""
    model, items = make_model(TOY, ToyArch(depth=2)), toy_items(1)
    given = TOY.training.make_inputs([items[0]["latents"]], torch.tensor([0.3]), items, 1.0)
    run = BlockEngine(policy="cuda:0=full, cuda:1=none")
    with torch.no_grad():
        found, expected = model(given, engine=run), model(given, engine=BlockEngine())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with pytest.raises(UserError, match="cuda:0"):
        model(given, engine=run)
