"""What a report reads of a run's folder, and its curves."""

import math
import random
import re
from pathlib import Path

import pytest
from made_runs import SIGMAS, write_run, write_samples

from ditkit_core.diagnostics.report.charts import HEIGHT, WIDTH, Chart
from ditkit_core.diagnostics.report.data import (
    MOST_POINTS,
    MOST_TIMES,
    Series,
    read_metrics,
    read_sections,
)
from ditkit_core.documents.html import macros
from ditkit_core.errors import UserError
from ditkit_core.io.run_dir import (
    is_changed_list,
    listed_samples,
    reserve_sample_number,
    sample_list,
)


def series(values: list[float]) -> Series:
    return Series(steps=list(range(len(values))), values=values)


def test_metrics_are_read_by_name_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "held_out": 2.0}\n{"step": 1, "loss": 0.5, "worst": "a"}\n[3]\nnull\n{"loss": 1}\n\n'
        '{"step": 2, "loss": 0.1, "worst": "b"}\n{"step": 3, "loss": NaN, "held_out": null, "lr": [1]}\n{"step": 4, "lo'
    )
    found, texts = read_metrics(path)
    assert found == {
        "held_out": Series(steps=[0], values=[2.0]),
        "loss": Series(steps=[1, 2], values=[0.5, 0.1]),
    }
    assert texts == {"worst": (2, "b")}


def test_numbers_that_no_curve_can_show_are_passed_over(tmp_path: Path) -> None:
    values = ["1e999", "-1e999", "NaN", "1" + "0" * 400, "-1" + "0" * 400, "0.5"]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "loss": {v}}}\n' for i, v in enumerate(values))
    )
    found, _ = read_metrics(tmp_path / "metrics.jsonl")
    assert found == {"loss": Series(steps=[5], values=[0.5])}
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1e999, "loss": 1}\n' + "[" * 100_000 + '\n{"step": 5, "loss": 0.5}\n'
    )
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == found, (
        "a step may be no number, and a line nested deeply"
    )


def test_a_run_and_the_runs_below_it_are_sections(tmp_path: Path) -> None:
    write_run(tmp_path / "both")
    write_run(tmp_path / "both" / "high_noise", 10)
    write_run(tmp_path / "parts" / "low_noise", 10)
    write_run(tmp_path / "parts" / "high_noise", 20)
    assert [section.name for section in read_sections(tmp_path / "both")] == ["", "high_noise"]
    high, low, whole = read_sections(tmp_path / "parts")
    assert (whole.name, whole.series, whole.samples) == ("", {}, [])
    assert (high.name, high.step, low.name, low.step) == ("high_noise", 20, "low_noise", 10)
    assert high.sigmas == list(SIGMAS) and high.config["train.steps"] == 1000
    with pytest.raises(UserError, match=r"has no metrics\.jsonl; name the folder of a run"):
        read_sections(tmp_path / "nowhere")


def test_a_downsampled_curve_keeps_its_ends_and_its_spikes() -> None:
    rng = random.Random(0)
    values = [rng.random() for _ in range(50_000)]
    values[31_234], values[777] = 900.0, -3.0
    thin = series(values).downsampled()
    assert len(thin.steps) <= MOST_POINTS and (thin.steps[0], thin.steps[-1]) == (0, 49_999)
    assert {31_234, 777} <= set(thin.steps) and list(thin.steps) == sorted(set(thin.steps))
    assert all(
        values[step] == value for step, value in zip(thin.steps, thin.values, strict=True)
    ), "points as they are"
    short = series(values[:MOST_POINTS])
    assert short.downsampled() is short


def test_smoothing_gives_the_first_values_no_more_weight() -> None:
    assert series([3.0, 3.0, 3.0]).smoothed(10).values == pytest.approx([3.0, 3.0, 3.0])
    once = series([1.0, 3.0]).smoothed(2).values
    assert once == pytest.approx([1.0, (0.5 * 1 + 3) / 1.5])
    assert series([5.0, 1.0]).smoothed(1).values == [5.0, 1.0]


def test_samples_are_of_few_steps_with_the_first_and_the_last(tmp_path: Path) -> None:
    run = write_run(tmp_path, 40)
    for step in range(0, 400, 10):
        write_samples(run / "samples", step, ("a",))
    (run / "samples" / "step-000390.json").write_text("{")  # torn
    (run / "samples" / "step-000380.json").write_text(
        '{"samples": 3, "shown": "../../elsewhere.png"}'
    )
    (run / "samples" / "step-000360.json").write_text(
        '{"samples": [{"file": "../../elsewhere.mp4"}]}'
    )
    for number in (1, 2, 999, 1000):
        # the first by an earlier version
        write_samples(
            run / "samples",
            number,
            ("by hand",),
            name=f"{'sampled' if number > 1 else 'drawn'}-{number:03d}-mine",
        )
    (section,) = read_sections(run)
    assert [each.title for each in section.by_command] == [
        "drawn-001-mine",
        *(f"sampled-{i}-mine" for i in ("002", "999", "1000")),
    ]
    with reserve_sample_number(run / "samples") as one, reserve_sample_number(run) as other:
        assert (one, other) == ("sampled-1001", "sampled-001")
    steps = [int(each.title.removeprefix("step ")) for each in section.samples]
    assert len(steps) == MOST_TIMES and (steps[0], steps[-1]) == (0, 370) and steps == sorted(steps)
    files = [sample.file for each in section.samples for sample in each.samples]
    assert all(file.parent == run / "samples" for file in files), "none from elsewhere"


def test_a_list_of_samples_that_changed_since_is_called_so(tmp_path: Path) -> None:
    """One bit of it: every flip inside a value shows, and a list of an earlier version has no
    digest to compare with."""
    run = write_run(tmp_path, 40)
    path = run / "samples" / "step-000010.json"
    listed = [{"file": "step-000010-0.png", "prompt": "a cat", "seed": 3, "decoded": ""}]
    path.write_text(sample_list(listed, "step-000010-0.png"))
    content = path.read_bytes()
    assert not is_changed_list(path) and listed_samples(path)[0].prompt == "a cat"
    for place in (
        content.index(b"cat") + 1,
        content.index(b"3"),
        content.index(b"-0.png"),
        content.index(b'"digest": "') + 12,
    ):
        path.write_bytes(
            bytes(byte ^ (1 if index == place else 0) for index, byte in enumerate(content))
        )
        assert is_changed_list(path), place
    (section,) = read_sections(run)
    titles = [each.title for each in section.samples]
    assert "step 10 (step-000010.json was changed or damaged since it was written)" in titles
    write_samples(run / "samples", 20, ("a",))
    assert not is_changed_list(run / "samples" / "step-000020.json")


def test_a_series_is_flat_if_a_curve_would_show_nothing() -> None:
    assert series([0.0, 0.0]).is_flat and series([5.0]).is_flat and series([-1.0, -1.005]).is_flat
    assert (
        not series([0.0, 1e-9]).is_flat
        and not series([1.0, 1.02]).is_flat
        and not series([-1.0, 1.0]).is_flat
    )


# Curves


def chart_figure(chart: Chart, section: int) -> str:
    return str(macros("diagnostics/report/macros.html").chart_figure(chart, section))


def coordinates(svg: str) -> list[tuple[float, float]]:
    paths = re.findall(r' d="([^"]*)"', svg)
    return [
        tuple(map(float, pair.split()))
        for path in paths
        for pair in re.split("[MLZ]", path)
        if pair.strip()
    ]


@pytest.mark.parametrize(
    "values",
    [
        [1.0], [0.0, 0.0], [-1.0, 1.0], [1e-12, 2e-12, 1.5e-12], [1e30, 2e30], [5.0, 5.0, 5.0], [0.0, 1e-300],
        [1.0, 1.0 + 2**-52], [math.exp(i) for i in range(40)],
    ],
)  # fmt: skip
@pytest.mark.parametrize("logarithmic", [False, True])
def test_every_curve_stays_inside_its_frame(values: list[float], logarithmic: bool) -> None:
    chart = Chart(
        name="x", title="X", series=series(values), level=values[0], logarithmic=logarithmic
    )
    svg = chart_figure(chart, section=0)
    found = coordinates(svg)
    assert len(found) == len(values)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in found)
    assert "nan" not in svg and "inf" not in svg


def test_the_axes_are_named_and_no_label_is_cut_off() -> None:
    """Of 1000000 at the right edge 10000 was left to read."""
    for values in ([12_000.0, 54_321.0], [1.0e-5, 1.25e-4], [1.001, 1.0025], [-1e30, 1e30]):
        svg = chart_figure(
            Chart(name="x", title="X", series=Series(steps=[0, 1_000_000], values=values)),
            section=0,
        )
        labels = re.findall(r'<text x="([^"]*)" y="[^"]*" text-anchor="(\w+)">([^<]*)</text>', svg)
        assert {"step", "1000000"} <= {text for _, _, text in labels}
        for x, anchor, text in labels:
            width = 7 * len(text)
            left = float(x) - (width if anchor == "end" else width / 2)
            assert -5 <= left and left + width <= WIDTH, text
    assert ">20000<" in chart_figure(
        Chart(name="x", title="X", series=series([12_000.0, 54_321.0])), section=0
    )


def test_higher_values_and_later_steps_are_higher_and_further_right() -> None:
    chart = Chart(name="x", title="X", series=Series(steps=[10, 20, 40], values=[1.0, 3.0, 2.0]))
    (x1, y1), (x2, y2), (x3, y3) = coordinates(chart_figure(chart, section=0))
    assert y1 > y3 > y2 and (x3 - x2) == pytest.approx(2 * (x2 - x1), abs=0.3)
    assert (y1 - y2) == pytest.approx(2 * (y1 - y3), abs=0.3)


def test_a_chart_says_in_words_what_it_shows() -> None:
    measured = Series(steps=[0, 5, 10], values=[2.0, 1.0, 1.5])
    svg = chart_figure(Chart(name="held_out", title="held-out loss", series=measured), section=3)
    assert 'role="img"' in svg and "2 at step 0, 1.5 at step 10; lowest 1 at step 5" in svg
    names = re.search(r'aria-labelledby="(\S+) (\S+)"', svg)
    assert names is not None and all(f'id="{name}"' in svg for name in names.groups())
    assert svg.count("<circle") == 3, "few measurements have a dot each"


def test_bytes_are_shown_in_gib() -> None:
    used = Series(steps=[1, 2], values=[2.0**31, 3.0 * 2**30])
    svg = chart_figure(
        Chart(name="peak_memory_bytes", title="memory", series=used, unit=2.0**30), section=0
    )
    assert "2 at step 1, 3 at step 2" in svg and ">2.5<" in svg and "e+09" not in svg
