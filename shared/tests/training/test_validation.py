"""The held-out loss: a fixed grid, measured without touching anything."""

import json

import pytest
import torch
from toy_training import toy_model

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import FlowConfig, HeldOutConfig
from ditkit_core.training.validation import (
    ValidationHistory,
    ValidationResult,
    half_width,
    sigmas_between,
    t_quantile,
    validation_loss,
)

SIGMAS = (0.2, 0.5, 0.9)


def measure(model, ids=("a", "b", "c"), sigmas=SIGMAS):
    items = dict(zip("abc", toy_items(3, ragged=True), strict=True))
    return validation_loss(
        Model(model, BlockEngine(), TOY), ids, [items[name] for name in ids], sigmas
    )


def test_noise_levels_reach_the_model_in_fp32_as_they_were_named():
    """993.7 thousandths have no bf16 form: the nearest are 992 and 996."""
    seen = []

    def seeing(noised, sigma, items, guidance):
        seen.append((sigma, guidance))
        return TOY.training.make_inputs(noised, sigma, items, guidance)

    model = make_model(TOY, TOY.architecture.presets["tiny"], dtype=torch.bfloat16)
    validation_loss(
        Model(model, BlockEngine(), altered(TOY, make_inputs=seeing)),
        ["a"],
        toy_items(1),
        (0.9937,),
        FlowConfig(guidance=3.5),
    )
    ((sigma, guidance),) = seen
    assert torch.equal(sigma, torch.tensor([0.9937])) and guidance == 3.5


def test_the_number_is_the_same_whatever_was_sampled_before():
    model, _ = toy_model(dropout=0.5)
    first = measure(model)
    torch.manual_seed(123)
    assert measure(model) == first
    assert first.mean > 0 and list(first.per_sigma) == list(SIGMAS)
    assert first.mean == pytest.approx(sum(first.per_sigma.values()) / 3)


def test_a_clip_and_a_level_count_alike_whatever_else_is_measured():
    model, _ = toy_model()
    alone = [measure(model, (name,)).per_sigma for name in "abc"]
    together = measure(model).per_sigma
    for sigma in SIGMAS:
        assert together[sigma] == sum(one[sigma] for one in alone) / 3
    assert measure(model, sigmas=(0.5,)).mean == together[0.5]


def test_measuring_leaves_modes_gradients_and_random_numbers_as_they_were():
    model, trainable = toy_model(dropout=0.5)
    model.train()
    model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    measure(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in trainable.values())


def test_modes_are_put_back_after_an_error():
    model, _ = toy_model()
    model.train()
    with pytest.raises(KeyError):
        validation_loss(
            Model(model, BlockEngine(), TOY),
            ["a"],
            [{"latents": toy_items(1)[0]["latents"]}],
            SIGMAS,
        )
    assert all(module.training for module in model.modules())


def test_a_better_model_has_a_lower_loss():
    model, trainable = toy_model()
    before = measure(model).mean
    with torch.no_grad():
        trainable["head.out.weight"].mul_(10)
    assert measure(model).mean > before


@pytest.mark.parametrize(
    "fields",
    [
        {"clips": -1},
        {"every_steps": -1},
        {"sigmas": ()},
        {"sigmas": (0.5, 1.5)},
        {"sigmas": (0.3, 0.5, 0.3000001)},
    ],
)
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(UserError, match=r"held_out\."):
        HeldOutConfig(**fields)


# Intervals


def grid_of(*clips, sigmas=(0.2, 0.8)):
    """A measurement with these errors at each level: clip by clip, level by level."""
    return ValidationResult.of(
        {sigma: [clip[place] for clip in clips] for place, sigma in enumerate(sigmas)}
    )


def test_the_interval_is_of_each_clip_against_itself():
    """Clips differ by far more than training changed them; paired, that drops out."""
    before = grid_of((1.0, 2.0), (5.0, 9.0), (30.0, 40.0))
    course = ValidationHistory()
    first = course.take(before, first=True)
    assert first == {
        "held_out": before.mean,
        "held_out/sigma_0.2": 12.0,
        "held_out/sigma_0.8": 17.0,
    }
    assert course.interval is None
    now = grid_of((0.8, 1.8), (4.7, 8.7), (29.9, 39.9))  # lower by 0.2, 0.3, 0.1
    numbers = course.take(now, first=False)
    half = 4.3027 * 0.1 / 3**0.5
    for name, value in {
        "held_out": now.mean,
        "held_out/sigma_0.2": 11.8,
        "held_out/sigma_0.8": 16.8,
    }.items():
        assert numbers[name] == pytest.approx(value)
        assert numbers[f"{name}_low"] == pytest.approx(value - half, abs=1e-4)
        assert numbers[f"{name}_high"] == pytest.approx(value + half, abs=1e-4)
    assert course.interval == (numbers["held_out_low"], numbers["held_out_high"])
    assert numbers["held_out_high"] > before.mean, "three clips are not enough to tell"
    numbers = course.take(grid_of((0.8, 1.8), (4.79, 8.79), (29.81, 39.81)), first=False)
    assert numbers["held_out_high"] < before.mean


def test_clips_are_the_units_not_noise_levels():
    """Two clips have one degree of freedom, however many levels each is measured at."""
    sigmas = tuple(i / 10 for i in range(10))
    course = ValidationHistory()
    course.take(grid_of((1.0,) * 10, (2.0,) * 10, sigmas=sigmas), first=True)
    numbers = course.take(grid_of((0.9,) * 10, (1.7,) * 10, sigmas=sigmas), first=False)
    half = (numbers["held_out_high"] - numbers["held_out_low"]) / 2
    assert half == pytest.approx(12.706 * 0.1, abs=1e-3)  # differences 0.1 and 0.3


def test_windows_of_one_file_are_one_unit():
    """Four windows of two files change alike within a file: that is two observations, not four."""
    before = grid_of((1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (2.0, 2.0))
    now = grid_of((0.9, 0.9), (0.9, 0.9), (1.7, 1.7), (1.7, 1.7))
    for files, half in ((("a", "a", "b", "b"), 12.706 * 0.1), ((), 3.182 * (0.04 / 3) ** 0.5 / 2)):
        course = ValidationHistory()
        course.take(before, first=True)
        numbers = course.take(now, first=False, files=files)
        for name in ("held_out", "held_out/sigma_0.2"):
            assert (numbers[f"{name}_high"] - numbers[f"{name}_low"]) / 2 == pytest.approx(
                half, abs=1e-3
            )


def test_one_clip_has_no_interval_and_neither_has_a_grid_that_changed():
    course = ValidationHistory()
    course.take(grid_of((1.0, 2.0)), first=True)
    assert course.take(grid_of((0.5, 1.0)), first=False).keys() == {
        "held_out",
        "held_out/sigma_0.2",
        "held_out/sigma_0.8",
    }
    course = ValidationHistory()
    course.take(grid_of((1.0, 2.0), (3.0, 4.0)), first=True)
    numbers = course.take(grid_of((0.5, 1.0), (2.0, 3.0), sigmas=(0.2, 0.7)), first=False)
    assert "held_out/sigma_0.2_low" in numbers and "held_out/sigma_0.7_low" not in numbers
    assert "held_out_low" not in numbers and course.interval is None


def test_a_course_goes_on_from_what_a_save_holds():
    course = ValidationHistory()
    course.take(grid_of((1.0, 2.0), (3.0, 4.0)), first=True)
    course.take(grid_of((0.5, 1.0), (2.0, 3.5)), first=False)
    again = ValidationHistory(json.loads(json.dumps(course.state())))
    assert (again.before, again.last, again.interval) == (
        course.before,
        course.last,
        course.interval,
    )
    assert again.state() == course.state()
    later = grid_of((0.25, 0.5), (1.0, 1.5))
    assert again.take(later, first=False) == course.take(later, first=False)
    # of a version without intervals
    old = ValidationHistory({"held_out_before": 2.5, "held_out_last": 2.0})
    assert (old.before, old.last) == (2.5, 2.0) and "held_out_low" not in old.take(
        later, first=False
    )


def test_noise_levels_are_those_that_an_expert_sees():
    levels = (0.1, 0.3, 0.5, 0.7, 0.9)
    assert sigmas_between(levels, 0.0, 1.0) == levels and sigmas_between((0.0, 1.0), 0.0, 1.0) == (
        0.0,
        1.0,
    )
    assert sigmas_between(levels, 0.0, 0.875) == (0.1, 0.3, 0.5, 0.7)
    assert sigmas_between(levels, 0.875, 1.0) == (0.8875, 0.9125, 0.9375, 0.9625, 0.9875), (
        "one level would say little"
    )
    assert sigmas_between((0.9,), 0.9, 1.0) == (0.9,), "a boundary belongs to the noisier expert"
    assert sigmas_between((0.9,), 0.0, 0.9) == (0.81,)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (9, 2.262),
        (10, 2.228),
        (30, 2.042),
        (120, 1.980),
    ],
)
def test_quantiles_are_those_of_printed_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=6e-4)
    assert t_quantile(degrees, 0.5) < t_quantile(degrees) < t_quantile(degrees, 0.99)


def test_another_confidence_is_another_column_of_the_table() -> None:
    assert t_quantile(5, 0.99) == pytest.approx(4.032, abs=6e-4) and t_quantile(
        6, 0.9
    ) == pytest.approx(1.943, abs=6e-4)


def test_the_interval_of_a_mean() -> None:
    """Mean 3, standard deviation 1.5811, five values: 2.776 * 1.5811 / sqrt(5)."""
    assert half_width([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.9632, abs=1e-3)
    assert half_width([2.0, 2.0, 2.0]) == 0
    assert half_width([1.0]) is None and half_width([]) is None


def test_values_of_one_unit_count_as_one() -> None:
    """Means of two units, 1 and 3: 12.706 * sqrt(2) / sqrt(2), however often each is seen."""
    assert half_width([1.0, 1.0, 3.0, 3.0], ["a", "a", "b", "b"]) == pytest.approx(12.706, abs=1e-3)
    assert half_width([1.0, 3.0], "ab") == half_width([1.0, 3.0]) == pytest.approx(12.706, abs=1e-3)
    assert half_width([1.0, 2.0, 3.0], "aaa") is None
    # by hand, of sizes 3 and 1 about the mean 1.75: sums -2.25 and 2.25, squares 10.125, times 2 /
    # 1, its root over 4 values
    uneven = half_width([1.0, 1.0, 1.0, 4.0], "aaab")
    assert uneven == pytest.approx(12.706 * (2 * 2 * 2.25**2) ** 0.5 / 4, abs=1e-3)
