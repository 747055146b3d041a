"""Numbers and verdicts as a person reads them."""

import pytest

from ditkit_core.diagnostics.report.words import format_duration, format_number, judge_change


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.38988, "1.39"), (2433.01, "2430"), (0.990585, "0.991"), (952164.352, "952000"), (0.0, "0"), (-3.14159, "-3.14"),
        (4.5e-5, "4.5e-05"), (7.0, "7"), (1e-300, "1e-300"), (1.5e12, "1.50e+12"), (150.0, "150"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert format_number(value) == shown
    assert float(shown) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0283333, "0.0283 s"), (41.6, "41.6 s"), (89, "1 min"), (725, "12 min"), (3601, "1 h 0 min"), (190_000, "52 h 47 min")],
)  # fmt: skip
def test_long_times_are_minutes_and_hours(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


@pytest.mark.parametrize(
    ("now", "interval", "kind", "words"),
    [
        (0.94, (0.5, 1.38), "fell", "validation loss fell 53 % (95 % confidence 31–75 %)"),
        (1.0, (-0.2, 1.8), "fell", "validation loss fell 50 % (95 % confidence 10–100 %)"),
        (1.94, (1.9, 1.98), "fell", "validation loss fell 3 % (95 % confidence 1–5 %)"),
        (3.0, (2.5, 3.5), "rose", "validation loss rose 50 % (95 % confidence 25–75 %)"),
        (1.5, (0.9, 2.1), "unclear", "validation loss did not change beyond chance (95 % confidence: 55 % lower to 5 % higher)"),
        (2.0, (2.0, 2.0), "unclear", "validation loss did not change beyond chance (95 % confidence: 0 % lower to 0 % higher)"),
        (1.5, None, "unclear", "validation loss fell 25 % (no confidence interval, which needs held-out clips of two files)"),
    ],
)  # fmt: skip
def test_the_verdict_says_how_much_and_whether_by_chance(
    now: float, interval: tuple[float, float] | None, kind: str, words: str
) -> None:
    verdict = judge_change(2.0, now, interval)
    assert verdict == judge_change(2.0, now, interval, clips=8) and verdict[:2] == (words, kind)


def test_a_headline_says_first_what_it_means_and_then_what_to_do() -> None:
    fell, rose = (
        judge_change(2.0, 0.64, (0.5, 0.78)),
        judge_change(2.0, 3.0, (2.5, 3.5), noun="image"),
    )
    assert fell.headline == "it learns: loss on unseen clips fell by 68 %" and not fell.advice
    assert fell.certainty == "This is more than chance (95 % confidence 61–75 %)."
    assert (
        rose.headline == "it got worse: loss on unseen images rose by 50 %"
        and "overfits" in rose.advice
    )
    chance = judge_change(2.0, 1.5, (0.9, 2.1), clips=8)
    assert (
        chance.headline == "it is too early to say: loss on unseen clips fell by 25 %"
        and "may be chance" in chance.certainty
    )
    assert "train longer" in chance.advice and "held_out" not in chance.advice
    single = judge_change(2.0, 1.5, None)
    assert (
        single.headline == "one held-out file cannot tell: loss on unseen clips fell by 25 %"
        and "4 to 8" in single.advice
    )


@pytest.mark.parametrize("clips", [1, 2, 3])
def test_few_clips_that_cannot_tell_are_named_as_the_cause(clips: int) -> None:
    said = judge_change(2.0, 0.5, (-1.0, 2.2), clips)
    assert said.kind == "unclear" and said.words == (
        "validation loss fell 75 %, which may be chance (95 % confidence: 100 % lower to 10 % "
        "higher): "
        f"{clips} held-out clips are too few to tell, hold out 4 to 8 (held_out.clips)"
    )
    number = ("one held-out clip", "two held-out clips", "three held-out clips")[clips - 1]
    assert said.headline == f"{number} cannot tell: loss on unseen clips fell by 75 %"
    assert (
        "may be chance" in said.certainty
        and "hold out 4 to 8 clips in the next run (held_out.clips)" in said.advice
    )
    assert judge_change(2.0, 0.5, (0.2, 0.8), clips).kind == "fell"
    assert "too few" not in judge_change(2.0, 2.0, (2.0, 2.0), clips).words
