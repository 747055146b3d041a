"""Numbers, durations and the verdict of a run in words."""

from collections.abc import Sequence
from typing import Literal, NamedTuple


def format_number(value: float) -> str:
    """A number with three significant digits."""
    return f"{float(f'{value:.3g}'):.10g}" if abs(value) < 1e9 else f"{value:.2e}"


def plural(count: object, noun: str) -> str:
    """A number with its noun: `1 sample`, `2 samples`, `2 micro-batches`."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending * (count != 1)}"


def format_duration(seconds: float) -> str:
    """A time in seconds, minutes, or hours and minutes."""
    if seconds < 60:
        return f"{format_number(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


class Verdict(NamedTuple):
    """Whether training lowered the validation loss."""

    words: str
    kind: Literal["fell", "rose", "unclear"]
    """`unclear` if the change may be chance, or nothing tells whether it is."""


_ENOUGH_CLIPS = 4
"""Held-out clips from which on an interval says something: Student's t is 12.7 for two, 4.3 for three, 3.2 for four."""


def judge_change(before: float, now: float, interval: Sequence[float] | None, clips: int = 0) -> Verdict:
    """Compare a validation loss with the one before training.

    Args:
        before: The loss before training; not 0.
        now: The loss to judge.
        interval: Lower and upper end of its 95 % confidence interval; None if there is none.
        clips: Number of held-out clips; 0 if it is not known.
    """
    fell = now <= before
    change = f"validation loss {'fell' if fell else 'rose'} {_percent(abs(now / before - 1))} %"
    if interval is None:
        return Verdict(f"{change} (no confidence interval, which needs held-out clips of two files)", "unclear")
    # Student's t may reach below a loss of 0, which would be a fall of more than 100 %.
    least, most = sorted(max(end / before, 0.0) - 1 for end in interval)
    if least <= 0 <= most:
        chance = f"95 % confidence: {_percent(abs(least))} % lower to {_percent(most)} % higher"
        if 0 < clips < _ENOUGH_CLIPS and now != before:
            few = f"{clips} held-out clips are too few to tell, hold out 4 to 8 (held_out.clips)"
            return Verdict(f"{change}, which may be chance ({chance}): {few}", "unclear")
        return Verdict(f"validation loss did not change beyond chance ({chance})", "unclear")
    nearest, farthest = sorted((abs(least), abs(most)))
    return Verdict(f"{change} (95 % confidence {_percent(nearest)}–{_percent(farthest)} %)", "fell" if fell else "rose")


def _percent(share: float) -> str:
    """Whole percent; below 10 two significant digits."""
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2g}"
