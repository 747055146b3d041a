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
    """For a line of a log, about the validation loss."""
    kind: Literal["fell", "rose", "unclear"]
    """`unclear` if the change may be chance, or nothing tells whether it is."""
    headline: str
    """The same for a reader who does not know the term: what it means, in the first words."""
    certainty: str = ""
    """How sure the headline is; empty if nothing tells."""
    advice: str = ""
    """What to do next; empty if there is nothing."""


_ENOUGH_CLIPS = 4
"""Held-out clips from which on an interval says something: Student's t is 12.7 for two, 4.3 for
three, 3.2 for four."""
_HOLD_OUT_MORE = "Compare the samples, and hold out 4 to 8 clips in the next run (held_out.clips): these clips stay as they are in this one."


def judge_change(
    before: float, now: float, interval: Sequence[float] | None, clips: int = 0, noun: str = "clip"
) -> Verdict:
    """Compare a validation loss with the one before training.

    Args:
        before: The loss before training; not 0.
        now: The loss to judge.
        interval: Lower and upper end of its 95 % confidence interval; None if there is none.
        clips: Number of held-out clips; 0 if it is not known.
        noun: What they are, for the headline: `clip` or `image`.
    """
    fell = now <= before
    size = f"{'fell' if fell else 'rose'} by {_percent(abs(now / before - 1))} %"
    change, unseen = f"validation loss {size.replace(' by', '')}", f"loss on unseen {noun}s {size}"
    if interval is None:
        why = "no confidence interval, which needs held-out clips of two files"
        headline = f"one held-out file cannot tell: {unseen}"
        return Verdict(f"{change} ({why})", "unclear", headline, f"There is {why}.", _HOLD_OUT_MORE)
    # Student's t may reach below a loss of 0, which would be a fall of more than 100 %.
    least, most = sorted(max(end / before, 0.0) - 1 for end in interval)
    if not least <= 0 <= most:
        confidence = "95 % confidence {}–{} %".format(
            *map(_percent, sorted((abs(least), abs(most))))
        )
        headline = f"{'it learns' if fell else 'it got worse'}: {unseen}"
        advice = "" if fell else "The run overfits, or the learning rate is too high (optim.lr)."
        sure = f"This is more than chance ({confidence})."
        return Verdict(
            f"{change} ({confidence})", "fell" if fell else "rose", headline, sure, advice
        )
    chance = f"95 % confidence: {_percent(abs(least))} % lower to {_percent(most)} % higher"
    unsure = f"This may be chance ({chance})."
    if 0 < clips < _ENOUGH_CLIPS and now != before:
        few = f"{clips} held-out clips are too few to tell, hold out 4 to 8 (held_out.clips)"
        number = ("one", "two", "three")[clips - 1]
        headline = f"{number} held-out {noun}{'s' * (clips > 1)} cannot tell: {unseen}"
        return Verdict(
            f"{change}, which may be chance ({chance}): {few}",
            "unclear",
            headline,
            unsure,
            _HOLD_OUT_MORE,
        )
    words = f"validation loss did not change beyond chance ({chance})"
    headline = f"it is too early to say: {unseen}"
    advice = "Compare the samples. If they do not change, train longer or with a higher learning rate (optim.lr)."
    return Verdict(words, "unclear", headline, unsure, advice)


def _percent(share: float) -> str:
    """Whole percent; below 10 two significant digits."""
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2g}"
