"""`train --plan`: what it prints, its exit status, and what it leaves alone."""

import json
import os
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from ditkit_core.commands.cli import run
from ditkit_core.commands.plan import fit_command
from ditkit_core.io import console
from ditkit_core.models.encoders import AuxiliaryModel
from ditkit_core.models.tiling import Tiles
from ditkit_core.run.plans import auxiliary_plan
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

WIDTH = 2**14
"""Of the auxiliary models' one layer: 1 GiB of weights in fp32."""


def auxiliary_model(name: str, stage, rows_per_pixel: float, **more) -> AuxiliaryModel:
    """One layer in fp32 that makes rows of 64 KiB."""

    def build(dtype: torch.dtype) -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(layer: nn.Module, size: tuple[int, int, int], device: torch.device) -> torch.Tensor:
        rows = int(rows_per_pixel * size[0] * size[1] * size[2])
        return layer(torch.empty(rows, WIDTH, device=device, dtype=layer.weight.dtype))

    return AuxiliaryModel(name=name, stage=stage, build=build, run=forward, **more)


WITH_AUXILIARY = altered(
    TOY,
    models=lambda arch, components: (
        auxiliary_model("VAE encoder", "encode", 1 / 16, tiles=Tiles(64, 16)),
        auxiliary_model("text encoder", "encode", 0),
        auxiliary_model("VAE decoder", "sample", 1 / 4, tiles=Tiles(64, 16)),
    ),
)


SIZE = ("--data.frames", "1", "--data.height", "256", "--data.width", "256")
"""Of all plans here that set no other, so that most of them are of one step."""


def plan(tmp_path, capsys, *flags: str, spec=TOY) -> tuple[int, str, str]:
    status = run(
        spec,
        "train",
        ["--model.preset", "tiny", "--run.folder", str(tmp_path / "run"), "--plan", *SIZE, *flags],
    )
    captured = capsys.readouterr()
    assert not list(tmp_path.iterdir()), "a plan writes nothing"
    return status, captured.out, captured.err


def test_json_is_all_of_stdout_and_says_that_it_fits(tmp_path, capsys):
    status, out, _ = plan(tmp_path, capsys, "--json", "--gpus", "24GiB")
    found = json.loads(out)
    assert status == 0 and found["fits"]
    (device,) = found["devices"]
    parts = ("weights", "adapters", "gradients", "optimizer", "average", "activations", "workspace")
    assert device["peak"] == sum(device[name] for name in parts)
    assert (
        device["free"]
        == device["total"] - device["reserve"] - device["peak"]
        > 0
        == device["missing"]
    )
    assert device["blocks"] == [0, 1] and found["flops_per_step"] > 0 < found["seconds_per_step"]


def test_a_plan_says_how_long_the_steps_of_the_run_take(tmp_path, capsys):
    flags = ("--gpus", "24GiB", "--train.steps", "5000")
    found = json.loads(plan(tmp_path, capsys, "--json", *flags)[1])
    assert (
        found["hours"] == pytest.approx(5000 * found["seconds_per_step"] / 3600)
        and found["steps"] == 5000
    )
    out = plan(tmp_path, capsys, *flags)[1]
    assert f"time: about {60 * found['hours']:.0f} min for 5,000 steps; encoding, validation" in out
    assert " steps; encoding" not in plan(tmp_path, capsys, "--train.device", "cpu")[1], (
        "a CPU's rate is unknown"
    )


def test_a_plan_says_whether_steps_are_replayed(tmp_path, capsys):
    found = {}
    for key in ("auto", "on", "off"):
        found[key] = json.loads(
            plan(tmp_path, capsys, "--json", "--gpus", "24GiB", "--train.cuda_graphs", key)[1]
        )
    assert [each["replayed"] for each in found.values()] == [True, True, False], (
        "the host takes longest with a model this small"
    )
    (replayed,), (eager,) = found["auto"]["devices"], found["off"]["devices"]
    assert replayed["peak"] > eager["peak"] and replayed["gradients"] == replayed["adapters"]
    assert found["auto"]["seconds_per_step"] < found["off"]["seconds_per_step"] / 2
    for flags, ending in (
        (("--train.cuda_graphs", "off"), "an eager step is planned"),
        ((), "a replayed step is planned"),
    ):
        said = plan(tmp_path, capsys, "--gpus", "24GiB", "--why", *flags)[1]
        assert any(line.endswith(ending) for line in said.splitlines())


def test_the_row_of_trained_weights_is_called_so_where_there_is_no_adapter(tmp_path, capsys):
    for method, wanted in (("lora", ["weights", "adapters"]), ("full", ["trained weights"])):
        flags = ("--adapter.method", method, "--model.dtype", "fp32", "--gpus", "24GiB")
        rows = [
            line.rpartition(" ")[0].strip()
            for line in plan(tmp_path, capsys, *flags)[1].splitlines()
        ]
        first = rows.index("gradients")
        assert rows[first - len(wanted) - 1 : first] == ["GiB", *wanted]


def test_a_gpu_that_is_too_small_is_status_3_and_says_what_lacks(tmp_path, capsys):
    status, out, _ = plan(
        tmp_path,
        capsys,
        "--gpus",
        "1.5GiB",
        "--train.batch_size",
        "4",
        "--data.height",
        "1024",
        "--data.width",
        "1024",
    )
    assert status == 3
    assert "does not fit: 1.5GiB lacks" in out.splitlines()[-1]


def test_two_gpus_divide_the_blocks(tmp_path, capsys):
    status, out, _ = plan(
        tmp_path, capsys, "--json", "--gpus", "2x24GiB", "--train.reserve", "[1, 2]"
    )
    devices = json.loads(out)["devices"]
    assert status == 0 and [device["blocks"] for device in devices] == [[0], [1]]
    assert devices[1]["reserve"] - devices[0]["reserve"] == 2**30
    assert devices[0]["crossing"] == 0 < devices[1]["crossing"]


def test_without_a_gpu_it_is_the_cpu_that_is_planned_for(tmp_path, capsys):
    status, out, _ = plan(tmp_path, capsys, "--json", "--train.device", "cpu")
    (device,) = json.loads(out)["devices"]
    assert (status, device["name"], device["reserve"], device["workspace"]) == (0, "cpu", 0, 0)


def auxiliary_rows(tmp_path, capsys, *flags: str) -> tuple[int, dict]:
    status, out, _ = plan(tmp_path, capsys, "--json", *flags, spec=WITH_AUXILIARY)
    return status, json.loads(out)


def test_encoding_and_sampling_are_planned_next_to_the_steps(tmp_path, capsys):
    """256 x 256 pixels are 4096 rows to encode and 16384 to draw, in and out: 0.5 GiB and 2 GiB."""
    status, found = auxiliary_rows(tmp_path, capsys, "--gpus", "24GiB")
    rows = {row["name"]: row for row in found["auxiliary"]}
    (device,) = found["devices"]
    assert status == 0 and found["fits"] and not found["previews"]
    assert [row["stage"] for row in found["auxiliary"]] == ["encode", "encode", "sample", "sample"]
    assert rows["VAE encoder"]["peak"] == 1.5 * 2**30 and rows["text encoder"]["peak"] == 2**30
    held = sum(device[name] for name in ("weights", "adapters", "optimizer", "average"))
    assert rows["VAE decoder"]["in_use"] == held and rows["VAE decoder"]["peak"] == held + 3 * 2**30
    assert (
        rows["denoising"]["size"] == rows["VAE decoder"]["size"]
        and rows["denoising"]["weights"] == 2**30
    )
    assert all(
        row["device"] == "24GiB" and row["fits"] and row["remedy"] is None for row in rows.values()
    )


def test_a_stage_next_to_the_steps_that_does_not_fit_is_status_3_with_a_remedy(tmp_path, capsys):
    flags = ("--sample.every_steps", "10")
    status, out, _ = plan(tmp_path, capsys, "--gpus", "2.5GiB", *flags, spec=WITH_AUXILIARY)
    last = out.splitlines()[-1]
    assert (
        status == 3
        and "does not fit: VAE encoder on 2.5GiB lacks" in last
        and "VAE decoder" not in last
    )
    assert "encode: VAE encoder does not fit 2.5GiB; encode.vae_tiling = true would need" in out
    assert "preview and sample: VAE decoder, 256x256, in bf16 tiles" in out, (
        "decodes as there is room for"
    )
    assert (
        plan(
            tmp_path,
            capsys,
            "--gpus",
            "2.5GiB",
            *flags,
            "--encode.vae_tiling",
            "true",
            spec=WITH_AUXILIARY,
        )[0]
        == 0
    )
    status, found = auxiliary_rows(
        tmp_path, capsys, "--gpus", "3.5GiB", *flags, "--sample.captions", "0"
    )
    assert status == 0 and [row["stage"] for row in found["auxiliary"]] == ["encode", "encode"], (
        "nothing is drawn"
    )


@pytest.mark.slow
def test_fit_changes_how_a_run_encodes_where_its_gpu_has_no_room_for_that(tmp_path, capsys):
    """The VAE in tiles where that is enough; else both encoders on the CPU. Nothing changes where
    there is room."""
    given = [
        "--model.preset",
        "tiny",
        "--run.folder",
        str(tmp_path / "run"),
        *SIZE,
        "--sample.captions",
        "0",
        "--fit",
    ]
    for gpu, changed in (
        ("3.5GiB", {}),
        ("2.5GiB", {"vae_tiling": True}),
        ("1.8GiB", {"device": "cpu"}),
    ):
        assert run(WITH_AUXILIARY, "train", [*given, "--gpus", gpu]) == 0
        out, err = capsys.readouterr()
        encode = tomllib.loads(out)["encode"]
        assert {
            key: encode[key]
            for key in ("vae_tiling", "device")
            if encode[key] not in (False, "auto")
        } == changed
        for key, value in changed.items():
            said = f"changed: encode.{key} = {str(value).lower()} (was "
            assert f"encoding does not fit as configured; {said}" in err and f"# {said}" in out


@pytest.mark.slow
def test_a_plan_says_what_host_memory_verifying_an_export_takes(tmp_path, capsys):
    verified, flags = (
        altered(TOY, verify=lambda *_: "fine"),
        ("--gpus", "3.5GiB", "--sample.captions", "0"),
    )
    line = "host memory while an export is verified, in a process of its own: 0.88 GiB"
    assert line in plan(tmp_path, capsys, *flags, spec=verified)[1]
    for spec, more in ((TOY, ()), (verified, ("--adapter.method", "full"))):
        assert "verified" not in plan(tmp_path, capsys, *flags, *more, spec=spec)[1]
    assert "verified" not in plan(tmp_path, capsys, "--train.device", "cpu", spec=verified)[1], (
        "done in between"
    )


def test_previews_on_a_device_of_their_own_are_planned_there(tmp_path, capsys, monkeypatch):
    flags = (
        "--gpus",
        "3.5GiB",
        "--sample.every_steps",
        "10",
        "--sample.vae_tiling",
        "true",
        "--train.swap_blocks",
        "1",
    )
    status, found = auxiliary_rows(tmp_path, capsys, *flags, "--sample.device", "cuda:1")
    (device,), *samples = found["devices"], *found["auxiliary"][-4:-2]
    weights = device["weights"] + device["adapters"]
    assert status == 0 and not found["previews"] and {row["stage"] for row in samples} == {"sample"}
    for row, sample in zip(found["auxiliary"][-2:], samples, strict=True):
        assert (row["stage"], row["name"], row["device"]) == (
            "preview",
            sample["name"],
            "sample.device cuda:1",
        )
        assert (
            row["available"] == sample["available"] and row["in_use"] == weights < sample["in_use"]
        ), "no optimizer"
    _, found = auxiliary_rows(tmp_path, capsys, *flags, "--sample.device", "cpu")
    assert (streamed := found["host"]["streamed_weights"]) > 0
    previews = {(row["device"], row["in_use"], row["fits"]) for row in found["auxiliary"][-2:]}
    assert previews == {("cpu", weights + streamed, None)}, "nothing is streamed there"
    monkeypatch.setattr(auxiliary_plan, "free_memory_bytes", lambda device: 2**40)
    _, found = auxiliary_rows(
        tmp_path, capsys, *flags[2:4], "--sample.device", "cpu", "--train.device", "cpu"
    )
    (device,), previews = found["devices"], found["auxiliary"][-2:]
    assert {row["available"] for row in previews} == {2**40 - device["peak"]}, (
        "the steps hold the rest"
    )
    assert found["auxiliary"][0]["available"] == 2**40, "what encodes comes before them"


def test_the_memory_of_another_machine_is_not_known(tmp_path, capsys):
    status, found = auxiliary_rows(tmp_path, capsys, "--gpus", "24GiB", "--encode.device", "cpu")
    encoder = found["auxiliary"][0]
    assert (status, encoder["device"], encoder["available"], encoder["fits"]) == (
        0,
        "cpu",
        None,
        None,
    )


def test_what_is_sampled_is_as_large_as_configured(tmp_path, capsys):
    flags = ("--gpus", "24GiB", "--sample.height", "64", "--sample.width", "128")
    prompts = (*flags, "--sample.prompts", '["a fox"]')
    for given, weights in ((prompts, 0), ((*prompts, "--sample.images", "2"), 2**30)):
        _, found = auxiliary_rows(tmp_path, capsys, *given)
        _, _, denoising, decoder = found["auxiliary"]
        assert decoder["size"] == denoising["size"] == [1, 64, 128]
        assert denoising["weights"] == weights, "the decoder stays while a second one is drawn"


def test_the_data_that_is_here_decides_what_is_encoded(tmp_path_factory, tmp_path, capsys):
    data = tmp_path_factory.mktemp("data")
    for name, size in (("a", (64, 128)), ("b", (128, 64))):
        Image.new("RGB", size).save(data / f"{name}.png")
        (data / f"{name}.txt").write_text(name)
    flags = (
        "--gpus",
        "24GiB",
        "--data.folder",
        str(data),
        "--data.buckets",
        "true",
        "--data.frames",
        "1",
    )
    _, found = auxiliary_rows(tmp_path, capsys, *flags)
    assert found["auxiliary"][0]["size"][0] == 1
    assert str(data) in found["bucket"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "24GiB"], "add --plan or --fit"),
        (["--json"], "add --plan, --audit-precision or --check"),
        (["--write", "x.toml"], "add --fit"),
        (["--plan", "--write", "x.toml"], "add --fit"),
        (["--plan", "--fit"], "leave one of them out"),
    ],
)
def test_options_that_go_with_others_are_refused_without(flags, message, tmp_path, capsys):
    assert run(TOY, "train", ["--run.folder", str(tmp_path / "run"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_that_does_not_fit_ends_with_the_command_that_searches(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    size = ("--train.batch_size", "4", "--data.height", "1024", "--data.width", "1024")
    Path("my run.toml").write_text("[model]\npreset = 'tiny'\n[run]\nfolder = 'run'\n")
    # Whatever program called it, as Python's own with -m: its arguments are those of the command.
    monkeypatch.setattr("sys.argv", ["/somewhere/train.py", "something", "else"])
    assert run(TOY, "train", ["my run.toml", "--plan", "--gpus", "1.5GiB", *size]) == 3
    typed = capsys.readouterr().out.splitlines()[-1].partition("; try: ")[2]
    assert (
        typed == f"toy-train 'my run.toml' --gpus 1.5GiB {' '.join(size)} --fit --write fitted.toml"
    )
    Path("my run.toml").unlink()
    # The command is accepted as it stands: it says itself that nothing fits, or writes the file.
    assert "try: " not in plan(tmp_path, capsys, "--gpus", "24GiB")[1]
    assert "try: " not in plan(tmp_path, capsys, "--train.device", "cpu")[1], "--fit is for GPUs"
    Path("fitted.toml").touch()
    assert fit_command("toy-train", ["a.toml", "--plan=true", "--plan", "true"]).endswith(
        "a.toml --fit --write fitted-2.toml"
    )
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert fit_command("toy-train", ["a.toml", "--plan"]).startswith(
        "uv run toy-train a.toml --fit"
    )


def test_json_outlives_a_reader_that_is_gone(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        flags = [
            "--model.preset",
            "tiny",
            "--run.folder",
            str(tmp_path / "run"),
            "--plan",
            "--json",
        ]
        assert run(TOY, "train", [*flags, "--gpus", "24GiB", *SIZE]) == 0


def test_what_lacks_room_outside_the_steps_is_no_matter_of_fit(tmp_path, capsys):
    flags = ("--gpus", "2.5GiB", "--sample.every_steps", "10")
    status, out, _ = plan(tmp_path, capsys, *flags, spec=WITH_AUXILIARY)
    assert status == 3 and "does not fit: VAE encoder" in out and "try: " not in out


def test_the_rate_that_is_printed_is_the_one_that_the_time_is_made_of(tmp_path, capsys):
    _, out, _ = plan(tmp_path, capsys, "--json", "--gpus", "rtx4090")
    found = json.loads(out)
    rate, source = found["assumed_rates"]
    assert rate.startswith("rtx4090: matmuls at up to ") and "of 165.2 TFLOP/s in bf16" in rate
    assert "an H100 reached" in source
    assert found["seconds_per_step"] >= found["flops_per_step"] / 165.2e12
    long = (
        "the time is an estimate: rtx4090: matmuls at up to ",
        "total: what torch reports, for a size",
    )
    short = "the time is an estimate, and reserve and workspace are assumed; --why says from what"
    why, plain = (plan(tmp_path, capsys, *more, "--gpus", "rtx4090")[1] for more in (["--why"], []))
    assert all(line in why and line not in plain for line in long)
    assert short in plain and short not in why
    assert max(map(len, plain.splitlines())) <= 120


def test_a_gpu_without_bf16_is_a_note(tmp_path, capsys):
    assert (
        't4 cannot compute in bf16, the dtype of this run; set model.dtype = "fp32"'
        in plan(tmp_path, capsys, "--gpus", "t4,rtx4090")[1]
    )
    status, out, _ = plan(tmp_path, capsys, "--gpus", "t4", "--model.dtype", "fp32")
    assert status == 0 and "cannot compute" not in out


def test_a_model_is_known_by_its_hub_id_and_a_wrong_path_is_said(tmp_path, capsys):
    known = replace(TOY, architecture=replace(TOY.architecture, hub_presets={"owner/tiny": "tiny"}))
    flags = ("--run.folder", str(tmp_path / "run"), "--plan", "--gpus", "24GiB", *SIZE)
    assert run(known, "train", ["--model.base", "owner/tiny", *flags]) == 0
    assert "toy tiny, checkpointing" in capsys.readouterr().out
    assert run(known, "train", ["--model.base", "/nowhere/tiny", *flags]) == 1
    assert (
        "model.base = '/nowhere/tiny' does not exist, and it is not a hub id (owner/name)"
        in capsys.readouterr().err
    )
    assert (
        run(
            known,
            "train",
            ["--model.base", "owner/tiny", "--model.transformer", "owner/else", *flags],
        )
        == 1
    )
    assert "model.transformer = 'owner/else' is not here" in capsys.readouterr().err


def test_what_is_planned_is_said_on_a_terminal(tmp_path, capsys, monkeypatch):
    assert plan(tmp_path, capsys, "--gpus", "24GiB", spec=WITH_AUXILIARY)[2] == ""
    monkeypatch.setattr(console._STDERR, "isatty", lambda: True)
    err = plan(tmp_path, capsys, "--gpus", "24GiB", spec=WITH_AUXILIARY)[2]
    assert [line.removesuffix(" ...") for line in err.splitlines()] == [
        "planning a training step, checkpointing none",
        "planning the VAE encoder",
        "planning the text encoder",
        "planning the VAE decoder",
    ]


def test_a_model_that_is_not_here_has_to_be_named(tmp_path, capsys):
    argv = [
        "--model.base",
        "owner/name",
        "--run.folder",
        str(tmp_path / "run"),
        "--plan",
        "--gpus",
        "24GiB",
    ]
    assert run(TOY, "train", argv) == 1
    assert "set model.preset to one of tiny, dropout" in capsys.readouterr().err


def test_host_memory_for_streamed_weights_is_none_of_a_cpu(tmp_path, capsys):
    status, _, err = plan(tmp_path, capsys, "--train.device", "cpu", "--host", "8GiB")
    assert status == 1 and "leave it out" in err and err.count("\n") == 1


def test_every_device_of_a_divided_model_denoises(tmp_path, capsys):
    _, found = auxiliary_rows(tmp_path, capsys, "--gpus", "24GiB,3.5GiB")
    first, second = [row for row in found["auxiliary"] if row["name"] == "denoising"]
    names = [device["name"] for device in found["devices"]]
    assert [first["device"], second["device"]] == names
    held = [
        sum(d[name] for name in ("weights", "adapters", "optimizer", "average"))
        for d in found["devices"]
    ]
    assert [first["in_use"], second["in_use"]] == held and (
        first["weights"],
        second["weights"],
    ) == (2**30, 0)
    other = found["devices"][1]
    assert second["available"] == other["total"] - other["reserve"] - other["workspace"]


@pytest.mark.slow
def test_what_pipelining_would_bring_is_estimated(tmp_path, capsys):
    flags = ("--gpus", "2x24GiB", "--train.accumulation", "4")
    _, out, _ = plan(tmp_path, capsys, "--json", *flags)
    orders = json.loads(out)["pipelining"]
    without, with_ = (sum(orders[name]["utilisation"]) for name in ("accumulated", "pipelined"))
    assert (
        without <= 1.0 + 1e-9
        and with_ > without
        and orders["gain"] > 1
        and orders["source"] == "estimated"
    )
    assert "with train.pipelined" in plan(tmp_path, capsys, *flags)[1]
    assert (
        json.loads(plan(tmp_path, capsys, "--json", "--gpus", "2x24GiB")[1])["pipelining"] is None
    )
    fused = ("--adapter.method", "full", "--model.dtype", "fp32", "--optim.fused_backward", "true")
    refused = plan(tmp_path, capsys, "--json", *flags, *fused, "--train.clip_by", "block")
    assert json.loads(refused[1])["pipelining"] is None, "a run refuses it there"


def test_class_images_are_planned_where_they_are_missing(tmp_path, capsys):
    flags = (
        "--gpus",
        "24GiB",
        "--sample.captions",
        "0",
        "--prior.prompt",
        "a dog",
        "--prior.images",
        "3",
    )
    _, found = auxiliary_rows(tmp_path, capsys, *flags)
    assert [row["name"] for row in found["auxiliary"] if row["stage"] == "sample"] == [
        "denoising",
        "VAE decoder",
    ]
    assert found["auxiliary"][-1]["size"] == [1, 256, 256]


@pytest.mark.slow
def test_class_images_that_are_larger_than_the_data_are_what_is_planned(tmp_path, capsys):
    for folder, size in (("data", (128, 128)), ("class", (256, 64))):
        (tmp_path / folder).mkdir()
        Image.new("RGB", size).save(tmp_path / folder / "a.png")
        (tmp_path / folder / "a.txt").write_text("a dog")
    (tmp_path / "here").mkdir()
    flags = (
        "--json",
        "--gpus",
        "24GiB",
        "--data.height",
        "128",
        "--data.width",
        "128",
        "--data.frames",
        "1",
    )
    flags += (
        "--data.buckets",
        "true",
        "--data.bucket_step",
        "128",
        "--data.folder",
        str(tmp_path / "data"),
    )

    def planned(*more: str) -> dict:
        return json.loads(plan(tmp_path / "here", capsys, *flags, *more)[1])

    without, with_ = planned(), planned("--prior.folder", str(tmp_path / "class"))
    assert with_["tokens"] == 2 * without["tokens"] and with_["bucket"].startswith(
        "1 x 128x256 (the largest of the class"
    )
    held = [found["devices"][0]["activations"] for found in (without, with_)]
    assert held[1] > 1.5 * held[0]


def test_settings_that_do_nothing_here_are_said(tmp_path, capsys):
    _, _, err = plan(
        tmp_path, capsys, "--train.device", "cpu", "--train.accumulation", "2", "--train.pipelined",
        "true",
        "--train.reserve", "[1]",
    )  # fmt: skip
    assert "this run has one" in err and "this run is on the CPU" in err
    _, _, err = plan(
        tmp_path, capsys, "--gpus", "2x24GiB", "--train.accumulation", "2", "--train.pipelined",
        "true",
        "--train.reserve", "[1]",
    )  # fmt: skip
    assert err == ""


def test_a_plan_of_ranks_is_of_one_of_them_and_says_what_it_sends(tmp_path, capsys):
    flags = (
        "--gpus",
        "24GiB",
        "--nproc",
        "4",
        "--nodes",
        "2",
        "--train.accumulation",
        "8",
        "--train.swap_blocks",
        "1",
    )
    status, out, _ = plan(tmp_path, capsys, *flags)
    assert status == 0
    assert "24GiB of 8" in out and "8 ranks on 2 machines of 4, each with the whole model" in out
    assert (
        "of 8 micro-batches of a step a rank has up to 1" in out and "for all 4 of a machine" in out
    )
    assert ["ib400, s", "10gbe, s"] == re.findall(r"\w+, s\b", out)
    found = json.loads(plan(tmp_path, capsys, *flags, "--json", "--link", "ib400")[1])
    host, ranks = found["host"]["streamed_weights"], found["ranks"]
    assert ranks["host_of_machine"] == 4 * host > 0 and ranks["layout"]["nodes"] == 2
    (time,) = ranks["times"]
    assert (
        time["step"] == pytest.approx(found["seconds_per_step"] + time["exposed"])
        and 0 < time["efficiency"] < 1
    )


def test_each_rank_of_a_machine_has_encoders_of_its_own(tmp_path, capsys, monkeypatch):
    """Of 1 GiB of weights; on the host, each has a part of what is free."""
    flags = ("--nproc", "4", "--nodes", "2", "--train.accumulation", "8")
    out = plan(tmp_path, capsys, "--gpus", "24GiB", *flags, spec=WITH_AUXILIARY)[1]
    assert "each rank: up to 1.00 GiB of weights, 4.00 GiB for all 4 of a machine" in out
    monkeypatch.setattr(auxiliary_plan, "free_memory_bytes", lambda device: 2**40)
    for given, available in (((), 2**40), (flags, 2**38)):
        _, found = auxiliary_rows(
            tmp_path, capsys, "--train.device", "cpu", "--encode.device", "cpu", *given
        )
        assert {row["available"] for row in found["auxiliary"] if row["stage"] == "encode"} == {
            available
        }


def test_a_plan_of_ranks_refuses_what_a_run_of_ranks_refuses(tmp_path, capsys):
    for flags, words in (
        (("--nproc", "4"), "train.accumulation"),
        (("--ranks.shard", "8", "--gpus", "4x24GiB"), "needs a multiple of 8 ranks"),
        (("--nproc", "2", "--train.accumulation", "2", "--link", "string"), "--link"),
    ):
        status, _, err = plan(tmp_path, capsys, *flags)
        assert status == 1 and words in err
