"""What a full fine-tune may change so that it fits, and schedules of several policies, on profiles
made by hand."""

from dataclasses import replace

import pytest
from made_profiles import GIB, made_full_profiles, made_profile

from ditkit_core.config.resolve import resolve
from ditkit_core.errors import UserError
from ditkit_core.planner.fit import HARDLY_LONGER, candidates, fit, scheduled
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.search import FitTask
from ditkit_core.planner.workload import Workload
from ditkit_core.run.config import RunConfig
from ditkit_core.run.plans.changes import COSTS, fit_levels, levels, state_bytes

FULL = {"adapter.method": "full", "model.dtype": "fp32", "train.accumulation": 4}


def config_of(**flags):
    return resolve(
        RunConfig, flags={**FULL, **{key.replace("__", "."): value for key, value in flags.items()}}
    )


def short(level):
    return ", ".join(f"{change.key} = {change.value}" for change in level.changed)


def shorts(config):
    return list(map(short, levels(config)))


FUSED = "optim.fused_backward = true, train.clip_by = last_step"
FAST = "precision.preset = fast"


def test_levers_are_added_in_the_order_of_what_they_change():
    split = f"{FUSED}, model.dtype = bf16, optim.rounding = split"
    stochastic = split.replace("split", "stochastic")
    eight_bits, adafactor = (
        f"{stochastic}, optim.name = {name}" for name in ("adamw8bit", "adafactor")
    )
    assert shorts(config_of()) == [
        "",
        FUSED,
        split,
        stochastic,
        eight_bits,
        adafactor,
        f"{adafactor}, {FAST}",
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"adapter__method": "lora"}, [""]),
        ({"adapter__method": "lora", "model__dtype": "bf16"}, ["", FAST]),
        ({"adapter__method": "lora", "model__dtype": "bf16", "precision__residual": "bf16"}, [""]),
        ({"optim__name": "prodigy", "optim__lr": 1.0}, [""]),
        ({"optim__name": "schedulefree_adamw"}, ["", FUSED]),
        (
            {"train__clip_norm": 0.0, "optim__name": "schedulefree_adamw"},
            ["", "optim.fused_backward = true"],
        ),
        (
            {"optim__name": "muon", "model__dtype": "bf16", "optim__rounding": "stochastic"},
            [
                "",
                FUSED,
                f"{FUSED}, optim.name = adafactor",
                f"{FUSED}, optim.name = adafactor, {FAST}",
            ],
        ),
        (
            {
                "optim__name": "adafactor",
                "model__dtype": "bf16",
                "optim__rounding": "split",
                "optim__fused_backward": True,
                "train__clip_by": "block",
            },
            ["", "optim.rounding = stochastic", f"optim.rounding = stochastic, {FAST}"],
        ),
    ],
)
def test_what_is_set_already_is_not_undone(flags, expected):
    assert shorts(config_of(**flags)) == expected


def test_each_change_says_what_it_was_and_what_it_costs():
    *_, last = levels(config_of())
    assert [str(each).partition(" (was ")[2].partition(")")[0] for each in last.changed] == [
        "false", "step", "fp32", "nearest", "adamw", "default",
    ]  # fmt: skip
    keys = {change.key for level in levels(config_of()) for change in level.changed}
    assert keys == {key.partition(" = ")[0] for key in COSTS if not key.startswith("encode.")}


def task_of(gpus, *, host=None, refused=()):
    def made(config):
        if config.optim.name in refused:
            raise UserError("contradicts another setting")
        return FitTask(
            gpus=parse_gpus(gpus),
            profile_of=made_full_profiles(config),
            quantizations=("none",),
            adapts=False,
            host=host,
            streams_trained=config.optim.fused_backward,
        )

    return made


def test_what_fits_as_configured_is_not_changed():
    level, _, found = fit_levels(config_of(), task_of("141GiB,141GiB"))
    assert level.changed == () and found.chosen is not None


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (None, FUSED),
        (64, f"{FUSED}, model.dtype = bf16, optim.rounding = stochastic"),
        (20, f"{FUSED}, model.dtype = bf16, optim.rounding = stochastic, optim.name = adamw8bit"),
    ],
)
def test_the_first_level_that_fits_is_chosen(host, expected):
    """12 blocks of half a billion weights each: what is streamed has to be on the host, whose limit
    decides how far the levels go."""
    level, _, found = fit_levels(
        config_of(), task_of("24GiB", host=None if host is None else host * GIB)
    )
    assert short(level) == expected
    assert all(plan.fits for plan in found.chosen.plan)
    assert host is None or found.chosen.host <= host * GIB


def test_a_level_that_contradicts_another_setting_is_passed_over():
    level, *_ = fit_levels(config_of(), task_of("24GiB", host=20 * GIB, refused=("adamw8bit",)))
    assert short(level).endswith("optim.name = adafactor")


def test_where_nothing_fits_the_last_level_is_what_lacks_least():
    level, _, found = fit_levels(config_of(), task_of("2GiB"))
    assert found.chosen is None and short(level).endswith(f"optim.name = adafactor, {FAST}")
    first, last = (
        state_bytes(task_of("2GiB")(each).profile_of("full", "none"))
        for each in (config_of(), level.config)
    )
    assert last < first / 7


LORA = {"adapter.method": "lora", "model.dtype": "bf16"}


def adapting(gpus, made_for):
    """A LoRA over blocks that keep and use half as much with the preset `fast`; each planned
    precision is added to a list."""

    def task(config):
        narrow = config.precision.preset == "fast"
        made_for.append(config.precision.preset)

        def profile_of(policy, quantize):
            made = made_profile(policy, quantize, num_blocks=12)
            halved = {
                name: getattr(made.blocks[0], name) // 2
                for name in ("kept", "released", "forward_extra", "backward_extra")
            }
            return (
                replace(made, blocks=(replace(made.blocks[0], **halved),) * 12) if narrow else made
            )

        return FitTask(gpus=parse_gpus(gpus), profile_of=profile_of)

    return task


@pytest.mark.parametrize(
    ("gpus", "expected", "planned"),
    [("24GiB", "", ["default"]), ("3.5GiB", FAST, ["default", "fast"])],
)
def test_a_lora_takes_the_narrow_residual_only_where_nothing_else_fits(gpus, expected, planned):
    made_for = []
    level, _, found = fit_levels(resolve(RunConfig, flags=LORA), adapting(gpus, made_for))
    assert short(level) == expected and all(plan.fits for plan in found.chosen.plan)
    assert made_for == planned, "what is not chosen is not planned"


def test_a_schedule_recomputes_less_than_one_policy_for_all_blocks():
    """Where `none` does not fit: as many blocks as have room keep their activations."""
    config = config_of(optim__fused_backward=True, train__clip_by="block")
    task = task_of("24.5GiB")(config)
    one_policy, several = fit(replace(task, adapts=True)).chosen, fit(task).chosen
    assert "=" in several.execution.checkpointing and several.score <= one_policy.score * (
        1 + HARDLY_LONGER
    )
    assert all(plan.fits for plan in several.plan) and several.host < one_policy.host
    uniform = list(candidates(task, "full", "none"))
    for like, mixed in zip(uniform, scheduled(task, uniform), strict=True):
        assert mixed.division == like.division and mixed.seconds < like.seconds
        assert all(plan.fits for plan in mixed.plan)
    again = several.within(0.9)
    assert again is None or all(plan.peak <= 0.9 * plan.budget.available for plan in again.plan)


def test_micro_batches_do_not_overlap_where_the_optimizer_steps_in_the_backward():
    task = replace(
        task_of("24GiB,24GiB")(config_of(optim__fused_backward=True)),
        work=Workload(micro_batches=4),
    )
    assert any(each.execution.pipelined for each in candidates(task, "full", "none"))
    assert not any(
        each.execution.pipelined
        for each in candidates(replace(task, overlaps=False), "full", "none")
    )
