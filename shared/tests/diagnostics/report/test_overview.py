"""The verdict on top of the page of a run."""

from ditkit_core.diagnostics.report.data import Section, Series
from ditkit_core.diagnostics.report.overview import section_verdict


def test_the_verdict_says_what_the_interval_says() -> None:
    def said(after: float, low: float | None, high: float | None) -> str:
        series = {"held_out": Series(steps=[0, 5, 10], values=[2.0, 1.9, after])}
        if low is not None and high is not None:
            series |= {
                "held_out_low": Series(steps=[10], values=[low]),
                "held_out_high": Series(steps=[10], values=[high]),
            }
        verdict, details = section_verdict(Section(name="", series=series))
        return " ".join([verdict.kind, verdict.words, *details])

    assert said(1.5, 1.2, 1.8).startswith("fell validation loss fell 25 % (95 % confidence 10–40 %)")
    assert "2 before training, 1.5 at step 10." in said(1.5, 1.2, 1.8)
    assert said(1.5, 0.9, 2.1).startswith("unclear validation loss did not change beyond chance")
    assert said(3.0, 2.5, 3.5).startswith("rose validation loss rose 50 % (95 % confidence 25–75 %)")
    assert "lowest at step 5: 1.9" in said(3.0, 2.5, 3.5)
    assert "no confidence interval" in said(1.5, None, None)
    verdict, details = section_verdict(Section(name="", series={}))
    assert verdict.kind == "unclear" and "does not show" in " ".join(details)
