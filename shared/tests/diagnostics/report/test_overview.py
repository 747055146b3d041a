"""The verdict on top of the page of a run."""

from ditkit_core.diagnostics.report.data import Section, Series
from ditkit_core.diagnostics.report.overview import LOOK, RANDOM_SAMPLES, overview, section_verdict
from ditkit_core.documents.html import macros


def shown(section: Section) -> str:
    return str(macros("diagnostics/report/macros.html").overview_part(overview(section)))


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

    assert said(1.5, 1.2, 1.8).startswith(
        "fell validation loss fell 25 % (95 % confidence 10–40 %)"
    )
    assert (
        "This is more than chance (95 % confidence 10–40 %). Validation loss: 2 before training, "
        "1.5 at step 10." in said(1.5, 1.2, 1.8)
    )
    assert said(1.5, 0.9, 2.1).startswith("unclear validation loss did not change beyond chance")
    assert said(3.0, 2.5, 3.5).startswith(
        "rose validation loss rose 50 % (95 % confidence 25–75 %)"
    )
    assert "lowest at step 5: 1.9" in said(3.0, 2.5, 3.5) and "--step best" in said(3.0, 2.5, 3.5)
    few = {"held_out": Series(steps=[0, 5], values=[3.98, 0.935])}
    few |= {
        "held_out_low": Series(steps=[5], values=[-2.0]),
        "held_out_high": Series(steps=[5], values=[4.6]),
    }
    words = section_verdict(Section(name="", series=few, data={"held_out": ["a", "b"]}))[0].words
    assert words.startswith(
        "validation loss fell 77 %, which may be chance (95 % confidence: 100 % lower to 16 % "
        "higher)"
    )
    assert "no confidence interval" in said(1.5, None, None)
    verdict, details = section_verdict(Section(name="", series={}))
    assert (
        verdict.kind == "unclear"
        and "does not show" in " ".join(details)
        and "hold out 4 to 8" in " ".join(details)
    )
    early = section_verdict(Section(name="", series={"held_out": Series(steps=[0], values=[2.0])}))[
        0
    ]
    assert early.headline == "too early to tell: validation loss is 2 at step 0"


def test_the_page_says_images_where_there_are_no_clips() -> None:
    series = {"held_out": Series(steps=[0, 5], values=[2.0, 1.0])}
    series |= {
        "held_out_low": Series(steps=[5], values=[0.8]),
        "held_out_high": Series(steps=[5], values=[1.2]),
    }
    for frames, noun in ((1, "images"), (17, "clips")):
        shapes = [{"frames": frames, "height": 8, "width": 8}]
        page = shown(Section(name="", series=series, data={"shapes": shapes}))
        assert f"It learns: loss on unseen {noun} fell by 50 %." in page


def test_a_loss_that_fell_is_no_proof_and_noise_is_called_noise() -> None:
    series = {"held_out": Series(steps=[0, 5], values=[2.0, 1.0])}
    interval = {
        "held_out_low": Series(steps=[5], values=[0.8]),
        "held_out_high": Series(steps=[5], values=[1.2]),
    }
    for model, parts in (({}, {LOOK}), ({"random_base": True}, {RANDOM_SAMPLES})):
        page = shown(Section(name="", series=series | interval, model=model))
        assert "It learns: " in page and "orks" not in page
        assert {line for line in (LOOK, RANDOM_SAMPLES) if line in page} == parts
        early = shown(Section(name="", series=series, model=model))
        assert LOOK not in early and (RANDOM_SAMPLES in early) == bool(model)


def test_adapters_of_the_base_and_of_samples_matched_steps_and_mirrors_are_named() -> None:
    config = {
        "base.merge": ["adapters/speed.safetensors@0.8"],
        "base.assistant_low": "adapters/undistilled.safetensors",
        "sample.adapter": ["a.safetensors", "b.safetensors"],
        "prior.match_base": 0.25,
        "data.flip": True,
    }
    page = shown(Section(name="", series={}, config=config))
    for line in (
        "speed.safetensors@0.8: merged into the base",
        "undistilled.safetensors: in training of the low-noise expert alone, as an assistant",
        "a.safetensors, b.safetensors: in samples alone",
        "25% of the steps match the base",
        "mirrored in half of their uses",
    ):
        assert line in page
    assert "adapters/" not in page and "merged into" not in shown(
        Section(name="", series={}, config={})
    )


def test_exports_that_were_verified_are_counted_and_wrong_ones_named() -> None:
    section = Section(
        name="",
        series={},
        verified={"cats.safetensors": True, "cats-step-000250.safetensors": False},
    )
    page = shown(section)
    assert "1 of 2 verified" in page and "cats-step-000250.safetensors does not work" in page
    assert "Exports" not in shown(Section(name="", series={}))
