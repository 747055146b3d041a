"""`--fit` as a person meets it, on the toy."""

import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from made_profiles import made_full_profiles, made_profile
from PIL import Image

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.api.dataset import read_dataset
from ditkit_core.commands import cli
from ditkit_core.commands import fit as fit_stage
from ditkit_core.commands.options import TrainOptions
from ditkit_core.config.sizes import GIB
from ditkit_core.config.toml import read_config_file
from ditkit_core.data.config import DataConfig
from ditkit_core.io import console
from ditkit_core.planner.auxiliary import AuxiliaryRow
from ditkit_core.planner.fit import candidates, fit, least_missing
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.search import FitTask
from ditkit_core.planner.workload import Workload
from ditkit_core.run import data as run_data
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run, with_config
from ditkit_core.run.plans import fit as search
from ditkit_core.run.plans import plan as plan_stage
from ditkit_core.run.plans.changes import levels as update_levels
from ditkit_core.run.plans.changes import levers
from ditkit_core.run.plans.fit import apply, changes, gpus_to_fit
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.training.optim.fused_checks import check_fused_backward

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

RUN = """
[run]
folder = "runs/x"
[model]
preset = "tiny"
[data]
frames = 5
height = 64
width = 96
[adapter]
rank = 4
[train]
steps = 7
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_fit_prints_a_run_file_that_keeps_what_was_set(run_file, tmp_path, capsys):
    assert cli.run(TOY, "train", [str(run_file), "--fit", "--gpus", "2x24GiB"]) == 0
    printed = capsys.readouterr()
    values = tomllib.loads(printed.out)
    assert (values["train"]["steps"], values["adapter"]["rank"], values["data"]["width"]) == (
        7,
        4,
        96,
    )
    assert (
        values["train"]["checkpointing"],
        values["train"]["device"],
        values["base"]["quantize"],
    ) == (
        "none",
        "cuda:0",
        "none",
    )
    assert "fits: checkpointing none" in printed.err
    fitted = tmp_path / "fitted.toml"
    fitted.write_text(printed.out)
    assert read_config_file(RunConfig, fitted)["train.steps"] == 7


@pytest.mark.parametrize("ranks", [[], ["--nproc", "2", "--train.accumulation", "2"]])
def test_why_adds_what_the_times_are_estimated_from(run_file, ranks, capsys):
    short, printed = "the times are estimates; --why says from what", []
    for why in (["--why"], []):
        assert cli.run(TOY, "train", [str(run_file), "--fit", "--gpus", "24GiB", *ranks, *why]) == 0
        printed.append(capsys.readouterr().err.splitlines())
    full, plain = printed
    longer = [line for line in full if line not in plain]
    assert any("assumed as of rtx3090" in line for line in longer) and short not in full
    assert any(line.startswith("exchanges are an estimate") for line in longer) == bool(ranks)
    assert all("is an estimate:" in line or "are an estimate:" in line for line in longer)
    assert [line for line in plain if line not in full] == [short]
    assert ranks or max(map(len, plain)) <= 180


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("", ("cuda:0", "cuda:1")),
        ("cpu", ("cuda:0", "cuda:1")),
        ("cuda", ("cuda:1", "cuda:2")),
        ("cuda:1", ("cuda:0", "cuda:2")),
    ],
)
def test_the_gpu_that_samples_previews_is_not_trained_on(device, names):
    config = config_of(sample={"device": device})
    assert gpus_to_fit(config, "2x24GiB")[1] == names
    gpus, (left,) = gpus_to_fit(config, "24GiB")
    chosen = fit(replace(made_task(gpus, config), quantizations=("none",))).chosen
    assert left == names[0]
    for given, kept in (("auto", "cuda:0"), ("cuda", "cuda:0"), ("cpu", ""), (left, left)):
        asked = replace(chosen, execution=replace(chosen.execution, device=given))
        fitted = apply(config, asked, (left,)).train
        assert (fitted.device, fitted.devices) == (given if kept == left else left, ())


def test_a_gpu_that_is_named_and_samples_previews_is_not_handed_out(
    run_file, made, monkeypatch, capsys
):
    card = SimpleNamespace(name="a card", total_memory=24 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    argv = [str(run_file), "--fit", "--sample.every_steps", "5", "--sample.device", "cuda:0"]
    assert cli.run(TOY, "train", [*argv, "--train.device", "cuda:0"]) == 1
    assert "sample.device = 'cuda:0' is a device that trains" in capsys.readouterr().err
    assert cli.run(TOY, "train", argv) == 0
    assert tomllib.loads(capsys.readouterr().out)["train"]["device"] == "cuda:1"


def test_each_profile_of_the_search_is_said_on_a_terminal(run_file, monkeypatch, capsys):
    monkeypatch.setattr(console._STDERR, "isatty", lambda: True)
    assert cli.run(TOY, "train", [str(run_file), "--fit", "--gpus", "24GiB"]) == 0
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == "planning a training step, checkpointing full, exact weights ..."


def test_fit_writes_a_file_but_overwrites_none(run_file, tmp_path, capsys):
    out = tmp_path / "fitted.toml"
    argv = [str(run_file), "--fit", "--gpus", "24GiB", "--write", str(out)]
    assert cli.run(TOY, "train", argv) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and f"written to {out}" in printed.err
    written = out.read_text()
    assert cli.run(TOY, "train", argv) == 1
    assert (
        " exists, and nothing is overwritten" in capsys.readouterr().err
        and out.read_text() == written
    )


@pytest.fixture
def pictures(tmp_path):
    """Two images of different shapes, with captions, and the flags that read them."""
    for name, size in (("a", (96, 64)), ("b", (64, 96))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text("a dog")
    data = ("--data.folder", str(tmp_path), "--data.buckets", "true", "--data.bucket_step", "16")
    return (*data, "--data.frames", "1")


def test_stdout_is_a_run_file_also_where_the_data_are_described(run_file, pictures, capsys):
    assert cli.run(TOY, "train", [str(run_file), *pictures, "--fit", "--gpus", "24GiB"]) == 0
    said = capsys.readouterr()
    assert tomllib.loads(said.out)["train"]["steps"] == 7
    assert "data.folder: " in said.err


def test_a_search_reads_and_describes_the_data_once(run_file, pictures, monkeypatch, capsys):
    """Not for each configuration that it tries: thousands of files take seconds."""
    read: list[DataConfig] = []

    def counted(config, *args, **kwargs):
        read.append(config)
        return read_dataset(config, *args, **kwargs)

    monkeypatch.setattr(run_data, "read_dataset", counted)
    assert cli.run(TOY, "train", [str(run_file), *pictures, "--fit", "--gpus", "24GiB"]) == 0
    assert len(read) == 1 and capsys.readouterr().err.count("data.folder: ") == 1
    run = create_run(TOY, RunConfig(data=read[0]))
    for rank in (4, 8):
        changed = with_config(run, replace(run.config, adapter=AdapterConfig(rank=rank)))
        assert len(changed.data.dataset.samples) == 2
    assert len(read) == 2, "a run with another rank has the same dataset"
    other = with_config(run, replace(run.config, data=replace(read[0], buckets=False)))
    assert {sample.width for sample in other.data.dataset.samples} == {96} and len(read) == 3


def test_a_wrong_text_about_gpus_is_one_line(run_file, capsys):
    assert cli.run(TOY, "train", [str(run_file), "--fit", "--gpus", "24"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_without_gpu_and_without_gpus_the_option_is_named(run_file, capsys):
    assert cli.run(TOY, "train", [str(run_file), "--fit", "--train.device", "cpu"]) == 1
    assert "--gpus 24GiB" in capsys.readouterr().err


def config_of(**sections):
    base = create_run(TOY, RunConfig()).config
    return replace(
        base, **{name: replace(getattr(base, name), **values) for name, values in sections.items()}
    )


def made_task(gpus, config, run=None):
    """Hand-made profiles that answer to frames, size, rank and batch."""
    data = config.data
    work = data.frames * data.height * data.width * config.train.batch_size / (49 * 480 * 832)

    def profile_of(policy, quantize):
        return made_profile(policy, quantize, work=work)

    return FitTask(
        gpus=tuple(gpus),
        profile_of=profile_of,
        execution=create_run(TOY, config).execution,
        work=Workload(micro_batches=config.train.accumulation),
    )


BIG = {
    "model": {"preset": "tiny"},
    "data": {"frames": 49, "height": 480, "width": 832},
    "adapter": {"rank": 4},
}


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(
        search,
        "task_for",
        lambda run, gpus, host=None: replace(made_task(gpus, run.config), host=host),
    )
    monkeypatch.setattr(fit_stage, "plan_auxiliary", lambda *args, **kwargs: ())


def test_what_is_chosen_is_set_and_nothing_else():
    config = config_of(train={"steps": 3, "reserve": (1.0, 2.0, 0.0)}, **BIG)
    gpus, names = gpus_to_fit(config, "24GiB,14GiB,4GiB")
    assert [
        card.reserve - plain.reserve
        for card, plain in zip(gpus, parse_gpus("24GiB,14GiB,4GiB"), strict=True)
    ] == [
        GIB,
        2 * GIB,
        0,
    ]
    found = fit(replace(made_task(gpus, config), quantizations=("none",)))
    execution, used = found.chosen.execution, found.chosen.gpus
    fitted = apply(config, found.chosen, names)
    assert fitted.train.checkpointing == execution.checkpointing
    if len(used) > 1:
        assert fitted.train.devices == tuple(f"cuda:{i}" for i in used)
        assert fitted.train.split_points == execution.split_points
        assert fitted.train.reserve == tuple((1.0, 2.0, 0.0)[i] for i in used)
    else:
        assert fitted.train.device == f"cuda:{used[0]}" and fitted.train.devices == ()
        assert fitted.train.reserve == ((1.0, 2.0, 0.0)[used[0]],)
    searched = {
        "checkpointing",
        "device",
        "devices",
        "split_points",
        "swap_blocks",
        "pipelined",
        "reserve",
    }
    for name, value in vars(config.train).items():
        assert name in searched or getattr(fitted.train, name) == value
    assert replace(fitted, train=config.train, base=config.base) == config


def test_where_nothing_fits_the_single_change_that_helps_most_is_planned(made, capsys):
    config = config_of(**BIG, train={"batch_size": 4})
    task = made_task(parse_gpus("7GiB"), config)
    assert least_missing(task) > 0
    planned = changes(TOY, config, task)
    assert planned[0].words.startswith("train.batch_size = 1 (now 4) with train.accumulation = 4")
    for each in planned:  # what is said of a change is what planning it says
        again = made_task(each.gpus, each.config)
        assert least_missing(again) == each.missing
        assert (fit(again).chosen is not None) == (each.missing == 0)
    assert planned == sorted(planned, key=lambda each: (each.missing, each.lost_share))
    assert any("frames" in each.words for each in planned) and any(
        "GPU" in each.words for each in planned
    )


def test_the_mildest_change_that_fits_is_offered():
    config = config_of(**BIG)
    ladders = list(levers(TOY, config, parse_gpus("24GiB")))
    for ladder in ladders:
        lost = [change.lost_share for change in ladder]
        assert lost == sorted(lost)
    assert (
        ladders[-2][0].gpus == parse_gpus("32GiB")
        and ladders[-2][0].words == "a GPU of 32 GiB in place of 24GiB"
    )
    assert ladders[-1][0].words == "one more GPU (24GiB)" and ladders[-1][0].gpus == (
        *parse_gpus("24GiB"),
        *parse_gpus("24GiB"),
    )


def test_nothing_fits_is_an_exit_status_and_says_what_would(made, monkeypatch, capsys):
    monkeypatch.setattr(plan_stage, "check_training", lambda run, *, here: None)
    assert (
        fit_stage.fit_run(
            TOY, config_of(**BIG, train={"batch_size": 4}), TrainOptions(fit=True, gpus="7GiB")
        )
        == 3
    )
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "nothing fits" in printed.err and "the single change that helps most: " in printed.err


def test_the_host_is_a_limit_that_can_be_given(made, monkeypatch, capsys):
    monkeypatch.setattr(plan_stage, "check_training", lambda run, *, here: None)
    options = TrainOptions(fit=True, gpus="10GiB")
    assert fit_stage.fit_run(TOY, config_of(**BIG), options) == 0
    assert "stay in host memory, page-locked; --host sets a limit" in capsys.readouterr().err
    assert fit_stage.fit_run(TOY, config_of(**BIG), replace(options, host="9GiB")) == 0
    assert "of 9.0 GiB that are available" in capsys.readouterr().err
    assert (
        fit_stage.fit_run(TOY, config_of(**BIG), replace(options, gpus="5GiB", host="0.1GiB")) == 3
    )
    assert "and has 0.10 GiB" in capsys.readouterr().err


def test_what_does_not_fit_next_to_the_steps_is_said_with_the_status_of_a_plan(
    made, monkeypatch, capsys
):
    row = AuxiliaryRow(
        stage="sample", name="VAE decoder", device="10GiB", size=(1, 64, 64), mode="whole",
        weights=1, in_use=1,
        peak=11 * GIB, available=10 * GIB, remedy="sample.vae_tiling = true would need 2.0 GiB",
    )  # fmt: skip
    monkeypatch.setattr(fit_stage, "plan_auxiliary", lambda *args, **kwargs: (row,))
    monkeypatch.setattr(plan_stage, "check_training", lambda run, *, here: None)
    assert fit_stage.fit_run(TOY, config_of(**BIG), TrainOptions(fit=True, gpus="24GiB")) == 3
    printed = capsys.readouterr()
    assert "sample: VAE decoder does not fit 10GiB; sample.vae_tiling = true" in printed.err
    assert "training fits, but the rows above do not" in printed.err and "[train]" in printed.out


def test_activations_go_to_the_host_where_nothing_fits_without(made, monkeypatch, capsys):
    monkeypatch.setattr(plan_stage, "check_training", lambda run, *, here: None)
    config = config_of(**BIG, train={"batch_size": 4})
    assert fit_stage.fit_run(TOY, config, TrainOptions(fit=True, gpus="9GiB")) == 0
    printed = capsys.readouterr()
    assert tomllib.loads(printed.out)["train"]["checkpointing"] == "full+offload"
    assert "GiB of activations are offloaded to host memory until the backward" in printed.err


@pytest.mark.parametrize(
    "policy",
    [
        "budget",
        "cuda:7=full",
        *(
            pytest.param(policy, marks=pytest.mark.exhaustive)
            for policy in ("full, 0=none", "every_n(2)")
        ),
    ],
)
def test_whatever_is_set_for_checkpointing_is_replaced(policy, run_file, capsys):
    flags = ["--fit", "--gpus", "24GiB", "--train.checkpointing", policy]
    assert cli.run(TOY, "train", [str(run_file), *flags]) == 0
    assert tomllib.loads(capsys.readouterr().out)["train"]["checkpointing"] == "none"


@pytest.mark.parametrize("option", ["--plan", "--fit"])
def test_what_a_run_refuses_is_refused_before_it_is_planned(option, run_file, capsys):
    refused = {
        "train.swap_blocks": [
            "--adapter.method",
            "full",
            "--model.dtype",
            "fp32",
            "--train.swap_blocks",
            "1",
        ],
        "base.quantize": [
            "--adapter.method",
            "full",
            "--model.dtype",
            "fp32",
            "--base.quantize",
            "int8",
        ],
        "sample.height": ["--sample.height", "3"],
    }
    for key, flags in refused.items():
        assert cli.run(TOY, "train", [str(run_file), option, "--gpus", "24GiB", *flags]) == 1, key
        (line,) = capsys.readouterr().err.splitlines()
        assert key in line


def small_run(tmp_path):
    """Flags of a run on images of 64 x 64."""
    size = "--model.preset tiny --data.frames 1 --data.height 64 --data.width 64"
    return [*size.split(), "--run.folder", str(tmp_path / "run")]


@pytest.mark.slow
def test_ranks_divide_what_does_not_fit_one_gpu(tmp_path, capsys):
    """All weights of a wide toy: 16 bytes each are more than a GPU has, and a part of them is
    not."""
    wide = altered(TOY, presets={"tiny": ToyArch(dim=4096, depth=3)})
    method = ["--adapter.method", "full", "--model.dtype", "fp32", "--train.accumulation", "4"]
    given = [*small_run(tmp_path), *method, "--fit"]
    status = cli.run(wide, "train", [*given, "--gpus", "8GiB", "--nproc", "4", "--link", "pcie"])
    out, err = capsys.readouterr()
    assert status == 0, err
    fitted = tomllib.loads(out)
    assert fitted["ranks"]["shard"] == 2 and fitted["ranks"]["context"] == 1, "a half fits"
    assert (
        "every 2 of them divide the model, repeated 2 times" in err
        and "(were 1 and 1)" in err
        and "s a step with exchanges" in err
    )


@pytest.mark.slow
def test_ranks_share_samples_where_a_step_has_fewer_micro_batches(tmp_path, capsys):
    given = [*small_run(tmp_path), "--train.accumulation", "2", "--fit"]
    assert cli.run(TOY, "train", [*given, "--gpus", "24GiB", "--nproc", "2", "--nodes", "2"]) == 0
    fitted = tomllib.loads(capsys.readouterr().out)
    assert fitted["ranks"]["context"] == 2, "four ranks, and two micro-batches"


FULL = ["--adapter.method", "full", "--model.dtype", "fp32", "--train.accumulation", "2"]


def test_levers_of_a_full_fine_tune_are_said_and_written(monkeypatch, capsys):
    def task_for(run, gpus, host=None):
        streams, profiles = run.config.optim.fused_backward, made_full_profiles(run.config)
        return FitTask(
            gpus=gpus,
            profile_of=profiles,
            execution=run.execution,
            quantizations=("none",),
            adapts=False,
            streams_trained=streams,
            host=host,
        )

    monkeypatch.setattr(search, "task_for", task_for)
    monkeypatch.setattr(fit_stage, "plan_auxiliary", lambda *args, **kwargs: ())
    sections = {
        "adapter": {"method": "full"},
        "model": {"dtype": "fp32", "preset": "tiny"},
        "train": {"accumulation": 2},
    }
    config = config_of(**sections)
    for host, changed in ((None, FUSED), ("20GiB", {**FUSED, **EIGHT_BITS})):
        assert (
            fit_stage.fit_run(TOY, config, TrainOptions(fit=True, gpus="24GiB", host=host or ""))
            == 0
        )
        printed = capsys.readouterr()
        assert "nothing fits as configured, so these settings are changed too" in printed.err
        said = [
            line.partition(" (was ")[0]
            for line in printed.err.splitlines()
            if line.startswith("changed: ")
        ]
        assert said == [f"changed: {key} = {value}" for key, value in changed.items()]
        fitted = tomllib.loads(printed.out)
        for key, value in changed.items():
            section, _, name = key.partition(".")
            assert (
                str(fitted[section][name]).lower() == value
                and f"# changed: {key} = {value} (was" in printed.out
            )
        assert (
            fitted["train"]["accumulation"] == 2
            and fitted["train"]["clip_norm"] == config.train.clip_norm
        )
    assert fit_stage.fit_run(TOY, config, TrainOptions(fit=True, gpus="2GiB")) == 3
    printed = capsys.readouterr()
    assert (
        not printed.out
        and "nothing fits: with everything recomputed and activations on the host, all"
        in printed.err
    )
    assert "changed: optim.name = adafactor (was adamw)" in printed.err


@pytest.mark.parametrize(
    ("gpu", "name"), [("96GiB", "adamw"), ("80GiB", "adamw8bit"), ("48GiB", "adafactor")]
)
def test_ranks_have_the_levers_that_do_not_need_an_update_in_the_backward(
    gpu, name, monkeypatch, capsys
):
    """Here none can divide a weight, because each block is clipped by itself."""
    full = {"quantizations": ("none",), "adapts": False}
    monkeypatch.setattr(
        search,
        "task_for",
        lambda run, gpus, host=None: FitTask(
            gpus=gpus, profile_of=made_full_profiles(run.config), execution=run.execution, **full
        ),
    )
    monkeypatch.setattr(fit_stage, "plan_auxiliary", lambda *args, **kwargs: ())
    config = config_of(
        adapter={"method": "full"},
        model={"dtype": "fp32", "preset": "tiny"},
        train={"accumulation": 2, "clip_by": "block"},
    )
    assert fit_stage.fit_run(TOY, config, TrainOptions(fit=True, gpus=gpu, nproc=2)) == 0
    out, err = capsys.readouterr()
    fitted = tomllib.loads(out)
    assert "nothing fits as configured, so these settings are changed too" in err
    assert (fitted["model"]["dtype"], fitted["optim"]["rounding"]) == ("bf16", "stochastic")
    assert fitted["optim"]["name"] == name
    assert not fitted["optim"]["fused_backward"] and fitted["train"]["clip_by"] == "block"
    assert fitted["ranks"]["shard"] == 1 and "# changed: model.dtype = bf16 (was fp32)" in out
    assert fit_stage.fit_run(TOY, config, TrainOptions(fit=True, gpus="32GiB", nproc=2)) == 3
    assert "however 2 ranks divide the run, each still lacks" in capsys.readouterr().err


def test_micro_batches_do_not_overlap_where_the_optimizer_steps_in_the_backward():
    """A run refuses the two together, so neither levels nor their search may lead there."""
    sections = {"adapter": {"method": "full"}, "model": {"dtype": "fp32", "preset": "tiny"}}
    config = config_of(**sections, train={"accumulation": 4, "pipelined": True})
    _, *fused = update_levels(config)
    assert len(fused) == 6
    for level in fused:
        task = search.task_for(create_run(TOY, level.config), parse_gpus("24GiB,24GiB"))
        task = replace(task, profile_of=made_full_profiles(level.config))
        one, both = candidates(task, "full", "none")
        assert len(one.gpus) == 1 and len(both.gpus) == 2
        for train in (level.config.train, apply(level.config, both, ("cuda:0", "cuda:1")).train):
            check_fused_backward(train, level.config.optim)


FUSED = {"optim.fused_backward": "true", "train.clip_by": "last_step"}
EIGHT_BITS = {"model.dtype": "bf16", "optim.rounding": "stochastic", "optim.name": "adamw8bit"}


def test_a_search_knows_what_goes_with_an_update_in_the_backward():
    for fused in (False, True):
        sections = {"adapter": {"method": "full"}, "model": {"dtype": "fp32", "preset": "tiny"}}
        config = config_of(optim={"fused_backward": fused}, train={"clip_by": "block"}, **sections)
        task = search.task_for(create_run(TOY, config), parse_gpus("24GiB"))
        assert (task.overlaps, task.streams_trained, task.adapts) == (not fused, fused, False)


@pytest.mark.slow
def test_a_full_fine_tune_is_given_the_levers_with_which_it_fits(tmp_path, capsys):
    """Each change is said, and the file that is written has the plan that was said."""
    wide = altered(TOY, presets={"tiny": ToyArch(dim=1024, depth=6)})
    out = tmp_path / "fitted.toml"
    given = [*small_run(tmp_path), *FULL, "--fit", "--gpus", "2GiB", "--write", str(out)]
    assert cli.run(wide, "train", given) == 0
    said = capsys.readouterr().err
    assert "nothing fits as configured, so these settings are changed too" in said
    values = tomllib.loads(out.read_text())
    assert values["optim"]["fused_backward"] and values["train"]["clip_by"] == "last_step"
    assert (values["train"]["accumulation"], values["model"]["dtype"], values["optim"]["name"]) == (
        2,
        "fp32",
        "adamw",
    )
    for changed in (
        "optim.fused_backward = true (was false): ",
        "train.clip_by = last_step (was step): ",
    ):
        assert f"changed: {changed}" in said and f"# changed: {changed}" in out.read_text()
    peak = float(said.partition(" GiB at the peak")[0].split()[-1])
    assert cli.run(wide, "train", [str(out), "--plan", "--gpus", "2GiB"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("peak")]
    assert float(row.split()[1]) == pytest.approx(peak, abs=0.06)
