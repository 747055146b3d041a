"""The page of a run: its numbers are the metrics file's, its texts are texts, and it loads
nothing."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from made_runs import HOSTILE, SIGMAS, write_run, write_samples
from report_pages import Page, check_numbers, metrics, read
from toy_world import World
from two_experts import TwoExperts

from ditkit_core.diagnostics.report.data import read_sections
from ditkit_core.diagnostics.report.page import report_page, write_report
from ditkit_core.io.run_dir import RunFolder


def test_numbers_are_those_of_the_metrics_file(tmp_path: Path) -> None:
    page = read(write_run(tmp_path))
    check_numbers(page, tmp_path)
    shown = re.findall(
        r'<data value="([^"]+)" data-key="([^"]+)" data-step="\d+">([^<]+)</data>', page.text
    )
    assert len(shown) == len(page.all("data"))
    for value, key, text in shown:
        shown_digits = float(value) / (2**30 if key.endswith("_bytes") else 1)
        assert float(text) == pytest.approx(shown_digits, rel=5e-3), (
            "three digits; the attribute has all"
        )


CONSTANT = {"peak_memory_bytes", "activation_max_block", "nonfinite", "grad_underflow"}
"""What does not change in the runs of `write_run`."""


def test_the_verdict_what_was_trained_and_the_samples_come_first(tmp_path: Path) -> None:
    page = read(write_run(tmp_path / "mine"))
    wanted = [
        "It learns: loss on unseen clips fell by ",
        "This is more than chance (95 % confidence ",
        "before training, ",
        "toy tiny",
        "LoRA, rank 32",
        "12,345 trained parameters",
        "7 clips",
        "17 frames, 64 × 96, 16 fps",
        "40 steps",
    ]
    wanted += [
        "learning rate 0.0001, adamw",
        "1 sample per step",
        "CPU, 1 of 2 threads",
        "peak memory 1 GiB",
    ]
    wanted += ["a cat (seed 0)", "a dog (seed 0)"]
    wanted += ["training loss", "dashed: before training", "gradient norm", "Constant: "]
    places = [page.shown.index(text) for text in wanted]
    assert places == sorted(places)
    assert page.titles == [
        "mine", "Samples", "Loss", "Training", "Validation loss by noise level", "Sentinels",
        "Newest numbers",
        "Validation loss in numbers", "Data", "Environment", "Configuration",
    ]  # fmt: skip
    assert re.search(", ".join(f"σ {sigma:g} −\\d+%" for sigma in SIGMAS), page.shown)
    assert "Sentinelsall activations are finite" in page.shown
    assert not any("open" in attributes for attributes in page.all("details")), (
        "what is special is folded"
    )


def test_the_account_of_steps_is_shown_as_shares_of_their_time(tmp_path: Path) -> None:
    """Of each GPU, the largest first; what takes less than half a percent is left to the chart."""
    run = write_run(tmp_path)
    parts = {
        "cuda:0/forward": 1.0,
        "cuda:0/backward": 2.0,
        "cuda:1/waiting": 0.99,
        "cuda:1/copies": 0.01,
    }
    with open(run / "metrics.jsonl", "a") as file:
        for step in (41, 42):
            numbers = {f"seconds/{name}": step / 41 * seconds for name, seconds in parts.items()}
            file.write(json.dumps({"step": step, "mfu": 0.41, **numbers}) + "\n")
    page = read(run)
    check_numbers(page, run)
    assert "Seconds of a step" in page.titles and "share of the GPUs' peak rate" in page.shown
    assert "cuda:0: backward 50%, cuda:0: forward 25%, cuda:1: waiting 25%" in page.shown


def test_activations_that_are_not_finite_unfold_the_sentinels(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 40, "nonfinite": 3}) + "\n")
    page = read(run)
    assert page.titles.index("Sentinels") < page.titles.index("Validation loss by noise level"), (
        "not folded"
    )
    assert "up to 3 activations are not finite" in page.shown
    assert "nonfinite" in {svg["data-name"] for svg in page.all("svg")}


def test_every_number_has_a_chart_or_is_said_to_be_constant(tmp_path: Path) -> None:
    page = read(write_run(tmp_path))
    shown = {svg["data-name"] for svg in page.all("svg")}
    names = {
        name
        for name, _ in metrics(tmp_path)
        if not name.endswith(("_low", "_high")) and name != "step"
    }
    assert shown == names - CONSTANT and len(page.all("svg")) == len(shown)
    line = page.text[page.text.index("Constant: ") :].split("</p>")[0]
    assert set(re.findall('data-key="([^"]+)"', line)) == CONSTANT
    for svg in page.all("svg"):
        values = [
            value for (name, _), value in metrics(tmp_path).items() if name == svg["data-name"]
        ]
        assert max(values) - min(values) > 0.01 * max(map(abs, values)), "no flat chart"
    assert page.text.count('class="band"') == 1 + len(SIGMAS) == page.text.count('class="level"')
    assert all(svg["role"] == "img" and svg["aria-labelledby"] for svg in page.all("svg"))


def test_what_a_chart_shows_is_said_also_where_nothing_was_measured_before_training(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path)
    later = [
        line for line in (run / "metrics.jsonl").read_text().splitlines() if '"step": 0' not in line
    ]
    (run / "metrics.jsonl").write_text("\n".join(later) + "\n")
    page = read(run)
    assert "band: 95 % confidence interval" in page.shown and "dashed" not in page.shown
    assert "not measured before and after training" in page.shown and "fell" not in page.shown


def test_the_page_loads_nothing_and_names_what_may_run(tmp_path: Path) -> None:
    page = read(write_run(tmp_path))
    (policy,) = [
        meta["content"]
        for meta in page.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; img-src data:; media-src data:; ")
    assert "unsafe" not in policy and "http" not in policy and "'self'" not in policy
    (style,) = re.findall("<style>(.*?)</style>", page.text, re.DOTALL)
    for kind, text in (("style", style), ("script", page.scripts[1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert len(page.scripts) == 2 and not page.all("link") and not page.all("iframe")
    assert "style" not in {name for _, attributes in page.elements for name in attributes}, (
        "the policy would refuse it"
    )
    sources = {
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name == "src"
    }
    assert [source[:22] for source in sources] == ["data:video/mp4;base64,"] and "url(" not in style
    links = {each["href"] for each in page.all("a")}
    assert (
        links == {f"samples/{path.name}" for path in (tmp_path / "samples").glob("*.mp4")}
        and len(links) == 4
    )
    assert "@import" not in style


def test_hostile_captions_and_file_names_are_shown_as_text(tmp_path: Path) -> None:
    plain = read(write_run(tmp_path / "plain", captions=("a",) * len(HOSTILE)))
    page = read(write_run(tmp_path / "<b>hostile & run", captions=HOSTILE))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements], (
        "no caption made an element"
    )
    for caption in HOSTILE[:3]:
        assert page.shown.count(caption) >= 3, "prompt, file left out, reason"
        assert any(caption == video["aria-label"] for video in page.all("video"))
    assert "<b>hostile & run" in page.shown
    assert (
        "\x00" not in page.text
        and "\x1b" not in page.text
        and "猫が走る 🐈 \ufffd half" in page.shown
    )
    check_numbers(page, tmp_path / "<b>hostile & run")


def test_a_sheet_is_linked_where_there_is_one(tmp_path: Path) -> None:
    run = RunFolder(write_run(tmp_path / "mine"))
    assert not [link for link in read(run.path).all("a") if "sheet" in link["href"]]
    run.sheet_page.parent.mkdir(parents=True)
    run.sheet_page.write_text("a sheet")
    (link,) = [link["href"] for link in read(run.path).all("a") if "sheet" in link["href"]]
    assert (run.path / link).read_text() == "a sheet"
    assert link not in report_page(run.path, read_sections(run.path), {}), "a server sends no such"


def test_a_name_in_the_metrics_cannot_end_the_script(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 40, "</script><!-- x & y": 1.5}) + "\n")
    page = read(run)
    assert page.numbers[0]["series"]["</script><!-- x & y"] == {"steps": [40], "values": [1.5]}
    assert len(page.scripts) == 2


def test_runs_of_several_experts_are_sections_of_one_page(tmp_path: Path) -> None:
    write_run(tmp_path / "high_noise", 20)
    write_run(tmp_path / "low_noise", 10, captions=("other",))
    write_samples(tmp_path / "samples", 20, ("sampled with both",))
    page = read(tmp_path)
    assert [section["name"] for section in page.numbers] == ["high_noise", "low_noise", ""]
    assert len(page.all("video")) == 7 and "sampled with both" in page.shown
    assert {link["href"].split("/")[0] for link in page.all("a")} == {
        "high_noise",
        "low_noise",
        "samples",
    }
    assert page.shown.count("It learns: loss on unseen clips fell by") == 2
    assert {svg["data-section"] for svg in page.all("svg")} == {"0", "1"}
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_a_long_run_makes_no_long_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, 10_000)
    text = write_report(run).read_text(encoding="utf-8")
    assert len(text) < 1_800_000, "with all points it has 5.8 MB"
    truth = metrics(run)
    for name, found in Page(text).numbers[0]["series"].items():
        assert all(
            truth[name, step] == value
            for step, value in zip(found["steps"], found["values"], strict=True)
        )
        assert found["steps"][-1] == max(step for key, step in truth if key == name)


@pytest.mark.parametrize("about", ["[]", "{", '{"environments": 3, "model": [], "data": {"shapes": {"a": 1}, "excluded": [3]}}',
    '{"environments": [{"devices": null}, 7], "model": {"trained_parameters": "x"}, "data": {"shapes": [{"frames": "9"}], "fps": "x"}}'])  # fmt: skip
def test_a_damaged_description_of_a_run_does_not_prevent_its_page(
    tmp_path: Path, about: str
) -> None:
    run = write_run(tmp_path)
    (run / "about.json").write_text(about)
    (run / "samples" / "step-000000.json").write_text(
        '{"samples": [3, {"file": null}, {"prompt": ["a"]}, {"file": "/etc/hosts"}]}'
    )
    check_numbers(read(run), run)


# In a run


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path)


def test_a_run_keeps_its_page_up_to_date(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from ditkit_core.commands import export, train, train_job

    steps: list[int] = []

    def spy(folder: Path) -> Path:
        path = write_report(folder)
        found = Page(path.read_text(encoding="utf-8"))
        check = [max(series["steps"]) for series in found.numbers[0]["series"].values()]
        steps.append(max(check, default=0))
        return path

    for module in (export, train, train_job):
        monkeypatch.setattr(module, "write_report", spy)
    flags = ("--held_out.clips", "2", "--save.every_steps", "2", "--sample.every_steps", "3")
    assert world.train("run", 4, *flags) == 0
    assert steps == [0, 2, 3, 4, 4, 4], (
        "previews at 0 and 3, saves at 2 and 4, the last samples, and once it is complete"
    )
    page = Page((world.folder / "run" / "report.html").read_text(encoding="utf-8"))
    check_numbers(page, world.folder / "run")
    assert "Complete at step 4." in page.shown and len(page.all("img")) == 6
    assert (
        torch.__version__ in page.shown
        and "picture number 0" in page.shown
        and "toy tiny" in page.shown
    )
    about = json.loads((world.folder / "run" / "about.json").read_text())
    assert (
        about["data"]["samples"] == 5
        and len(about["data"]["held_out"]) == 2
        and len(about["environments"]) == 1
    )
    assert about["model"]["family"] == "toy" and about["model"]["trained_parameters"] > 0
    assert about["data"]["shapes"] == [{"frames": 1, "height": 16, "width": 16, "samples": 5}]
    assert not list((world.folder / "run").glob("*.tmp"))


def test_the_page_is_written_anew_by_a_command_that_needs_no_model(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.train("run", 2, "--sample.captions", "0") == 0
    run = world.folder / "run"
    (run / "report.html").unlink()
    (world.folder / "toy.safetensors").unlink()
    capsys.readouterr()
    assert world.run("train", "--run", str(run), "--report") == 0
    assert str(run / "report.html") in capsys.readouterr().out
    check_numbers(Page((run / "report.html").read_text(encoding="utf-8")), run)
    assert world.run("train", "--run.folder", str(world.folder / "nowhere"), "--report") == 1
    error = capsys.readouterr().err
    assert "nowhere has no metrics.jsonl" in error and error.count("\n") == 1
    assert world.run("train", "--run", str(run), "--report", "--plan") == 2
    assert "--report only writes the report of a run and stops" in capsys.readouterr().err


def test_a_run_of_two_experts_has_a_page_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = TwoExperts(tmp_path)
    assert world.train("both", 2, "--held_out.clips", "2", "--save.every_steps", "1") == 0
    page = Page((world.folder / "both" / "report.html").read_text(encoding="utf-8"))
    assert [section["name"] for section in page.numbers] == ["high_noise", "low_noise", ""]
    high, low = (section["series"].keys() for section in page.numbers[:2])
    assert any("sigma" in name for name in high) and not any(
        name in low for name in high if "sigma" in name
    )
    assert page.shown.count("Complete at step 2.") == 2 and len(page.all("img")) == 2
    for name in ("high_noise", "low_noise"):
        check_numbers(
            Page((world.folder / "both" / name / "report.html").read_text("utf-8")),
            world.folder / "both" / name,
        )


def test_a_run_that_goes_on_elsewhere_keeps_both_environments(tmp_path: Path) -> None:
    from ditkit_core.diagnostics.report.environment import write_about
    from ditkit_core.io.run_dir import RunFolder

    folder = RunFolder(tmp_path)
    for device in ("cpu", "cpu", "cuda:0", "cuda:0"):
        write_about(folder, environment={"devices": device}, data={}, model={"family": "toy"})
    kept = json.loads(folder.about.read_text())["environments"]
    assert [each["devices"] for each in kept] == ["cpu", "cuda:0"] and all(
        each["since"] for each in kept
    )


@pytest.mark.parametrize("damaged", [["cpu", 3, None], "cpu", {"cpu": 1}])
def test_environments_that_are_none_are_left_out(tmp_path: Path, damaged: object) -> None:
    from ditkit_core.diagnostics.report.environment import write_about
    from ditkit_core.io.run_dir import RunFolder

    folder = RunFolder(tmp_path)
    folder.about.write_text(json.dumps({"environments": damaged}))
    write_about(folder, environment={"devices": "cpu"}, data={}, model={})
    assert [each["devices"] for each in json.loads(folder.about.read_text())["environments"]] == [
        "cpu"
    ]


@pytest.mark.parametrize("values", [(1e-320, 0.5), (1e-320, 2e-320), (5e-324, 5e-324)])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_chart_of_the_smallest_numbers_is_shown(
    values: tuple[float, ...], logarithmic: bool
) -> None:
    from ditkit_core.diagnostics.report.charts import Chart
    from ditkit_core.diagnostics.report.data import Series
    from ditkit_core.documents.html import macros

    shown = Series(steps=(1, 2), values=values)
    figure = str(
        macros("diagnostics/report/macros.html").chart_figure(
            Chart(name="loss", title="Loss", series=shown, logarithmic=logarithmic), 0
        )
    )
    assert "nan" not in figure and 'class="grid"' in figure


@pytest.mark.parametrize("step", [2**53, 10**400, -1])
def test_lines_of_a_step_that_no_run_has_are_left_out(tmp_path: Path, step: int) -> None:
    from ditkit_core.diagnostics.report.data import read_metrics

    lines = [{"step": 1, "loss": 0.5}, {"step": step, "loss": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(read_metrics(tmp_path / "metrics.jsonl")[0]["loss"].steps) == [1]
