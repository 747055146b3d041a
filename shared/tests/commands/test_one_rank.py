"""What one of two ranks has alone: both decide together what follows, and one line names the rank
that failed."""

import json
import re
import socket
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load

from ditkit_core.testing.conformance_replicas import run_once

SCRIPT = Path(__file__).parents[1] / "support" / "one_rank_of_toy.py"
STEPS = 4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform == "win32", reason="ranks are forked"),
]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script wrote; all cases run in one start of it."""
    return run_once(tmp_path_factory.getbasetemp(), SCRIPT, 550)


def saves(folder: Path, name: str) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / name / "state").glob("step-*"))


def lines(folder: Path, name: str) -> list[str]:
    """Errors that either rank printed."""
    logs = [(folder / f"{name} {rank}.log").read_text() for rank in range(2)]
    return [
        line
        for log in logs
        for line in log.splitlines()
        if line.startswith("error: ") or "Traceback" in line
    ]


def samples(folder: Path, name: str) -> dict[Path, bytes]:
    """Every file of the folders of samples, and of that of class images."""
    parts = ("**/samples/*", "prior/*", "class-*")
    paths = [path for part in parts for path in (folder / name).glob(part) if path.is_file()]
    return {path.relative_to(folder / name): path.read_bytes() for path in paths}


def result(folder: Path, name: str) -> dict:
    return json.loads((folder / "cases.json").read_text())[name]


def test_two_ranks_save_measure_and_sample_as_one(folder):
    """The index of a save has the digests of weights, optimizer, average and metrics."""
    assert result(folder, "plain") == {"codes": {}}, lines(folder, "plain")
    assert saves(folder, "plain") == saves(folder, "alone") == [2, 4]
    for step in (2, 4):
        one, two = (
            json.loads((folder / name / f"state/step-{step:06d}/state.json").read_text())
            for name in ("alone", "plain")
        )
        assert one == two
    assert samples(folder, "plain") == samples(folder, "alone")
    previews = [path for path in samples(folder, "plain") if path.name.startswith("step-000002")]
    assert len(previews) == 5, "three samples, their list, and the image of all"
    assert len([path for path in samples(folder, "plain") if path.parent.name == "prior"]) == 6, (
        "with their captions"
    )
    assert (folder / "plain 1.log").read_text() == ""
    files = [
        sorted((folder / name / "exports").glob("*.safetensors")) for name in ("alone", "plain")
    ]
    assert [path.name.replace("alone", "plain") for path in files[0]] == [
        path.name for path in files[1]
    ] and files[0]
    assert all(exported(one)[1:] == exported(two)[1:] for one, two in zip(*files, strict=True)), (
        "names and bytes"
    )


def test_three_ranks_use_samples_of_every_size_as_one_process_does(folder):
    """Of three sizes one has a single image, so that micro-batches have one or two; no rank waits
    for more of that size."""
    names = "sizes alone", "sizes of three"
    assert result(folder, names[1]) == {"codes": {}}, lines(folder, names[1])
    one, three = (
        json.loads((folder / name / "state/step-000004/state.json").read_text()) for name in names
    )
    assert one == three
    assert all(
        "4 samples have 3 shapes: 1.3 in a micro-batch" in (folder / f"{name} 0.log").read_text()
        for name in names
    )


def test_ranks_that_divide_weights_and_tokens_sample_as_one_with_an_adapter_for_samples(folder):
    """Before training, whose sums over ranks have another order. The adapter is an export of
    another run."""
    assert result(folder, "adapter") == {"codes": {}}, lines(folder, "adapter")
    alone, two = (samples(folder, name) for name in ("adapter alone", "adapter"))
    assert alone.keys() == two.keys() == samples(folder, "alone").keys()
    for path, content in alone.items():
        if path.parent.name == "prior" or path.name.startswith("step-000000"):
            assert content == two[path]
            assert content != samples(folder, "alone")[path] or path.suffix != ".png"


def test_ranks_that_exchange_experts_sample_as_one(folder):
    """Class images, previews of each expert, and the samples of both at the end."""
    classes, as_one = (
        samples(folder, f"classes of {name}") for name in ("experts", "experts alone")
    )
    assert classes == as_one and len(classes) == 6
    assert result(folder, "experts") == {"codes": {}}, lines(folder, "experts")
    found = samples(folder, "experts")
    assert found == samples(folder, "experts alone")
    assert {str(path.parent) for path in found} == {
        "samples",
        "high_noise/samples",
        "low_noise/samples",
    }


def test_ranks_that_divide_experts_sample_as_one(folder):
    """A run of one process goes on divided: the preview of its save. The next steps add gradients
    in another order."""
    name = "experts divided"
    assert result(folder, name) == {"codes": {}}, lines(folder, name)
    alone, two = samples(folder, "experts alone"), samples(folder, name)
    previews = [
        path for path in two if path.parts[0] == "low_noise" and path.name.startswith("step-000002")
    ]
    assert len(previews) == 5
    assert all(two[path] == alone[path] for path in previews)
    assert {path for path in two if path.parts[0] == "samples"} == {
        path for path in alone if path.parts[0] == "samples"
    }


class Exports(NamedTuple):
    """Two files of the same names, dtypes, shapes and metadata."""

    configs: tuple[dict, dict]
    """But for `[ranks]`."""
    same: bool
    """Bitwise."""
    apart: float
    """Distance of their values, relative."""


def exported(path: Path) -> tuple[dict, dict, bytes]:
    """What an export has besides tensors; name, dtype, shape and place of each tensor; and their
    bytes."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:end])
    return tensors.pop("__metadata__"), tensors, content[end:]


def compared(alone: Path, two: Path) -> Exports:
    """The export of one process, and that of two ranks that divide the weights."""
    (about, tensors, values), (about_two, tensors_two, values_two) = exported(alone), exported(two)
    assert tensors == tensors_two and len(tensors) > 4
    configs = (
        tomllib.loads(about.pop("ditkit.config")),
        tomllib.loads(about_two.pop("ditkit.config")),
    )
    assert about == about_two and about["ditkit.step"]
    assert [config.pop("ranks")["shard"] for config in configs] == [1, 2]
    both = (load(path.read_bytes()) for path in (alone, two))
    one, other = (torch.cat([found[key].double().flatten() for key in tensors]) for found in both)
    return Exports(configs, values == values_two, float((one - other).norm() / one.norm()))


def test_ranks_that_divide_weights_export_what_one_process_exports(folder):
    """The save of one process bitwise. The steps after it add gradients in another order, by which
    bf16 rounds a number the other way."""
    alone, two = (
        folder / name / "low_noise" / "exports" for name in ("experts alone", "experts divided")
    )
    names = sorted(path.name for path in alone.iterdir())
    assert sorted(path.name for path in two.iterdir()) == names and len(names) == 3
    for name in names:
        found = compared(alone / name, two / name)
        assert found.configs[0] == found.configs[1]
        assert found.same or "000002" not in name
        assert found.apart < 4e-3


@pytest.mark.parametrize("name", ["full divided", "full divided later", "merged divided later"])
def test_ranks_that_divide_weights_export_the_transformer_of_one_process(folder, name):
    """After each of their saves within the limit of divided training; that of a save of one process
    bitwise. Both forms, in fp32."""
    whole = f"{name.split()[0]} alone"
    assert result(folder, whole) == result(folder, name) == {"codes": {}}, lines(folder, name)
    alone, two = (folder / each / "exports" for each in (whole, name))
    files = sorted(path.relative_to(alone) for path in alone.rglob("transformer_*/*"))
    assert files == sorted(path.relative_to(two) for path in two.rglob("transformer_*/*"))
    transformers = [path for path in files if path.suffix == ".safetensors"]
    assert len(transformers) == 4, "two forms, of the save in the middle and of the finished run"
    for path in transformers:
        found = compared(alone / path, two / path)
        assert [config["run"].pop("folder") for config in found.configs] == [whole, name]
        assert found.configs[0] == found.configs[1]
        assert found.same or not name.endswith("later") or "step-000002" not in path.parts
        assert found.apart < 1e-4


def test_a_transformer_is_gathered_tensor_by_tensor(folder):
    """The host of the first rank has one whole weight, and the next one: the last is kept for forms
    that split it."""
    rows = [
        tuple(map(int, line.split()))
        for line in (folder / "full divided.gathered").read_text().splitlines()
    ]
    exports = [
        exported(path) for path in (folder / "full alone" / "exports").rglob("*.safetensors")
    ]
    assert sum(size for _, size in rows) >= 0.99 * sum(len(values) for *_, values in exports)
    assert max(alive for alive, _ in rows) <= 2 * max(size for _, size in rows)


def test_previews_that_one_rank_cannot_generate_are_left_out_on_both_in_one_line(folder):
    """The second rank misses a file when training begins, and has it at the end."""
    name = "experts of one"
    assert result(folder, name) == {"codes": {}}, lines(folder, name)
    assert (folder / f"{name} 1.log").read_text() == ""
    for expert in ("high_noise", "low_noise"):
        said = f"no previews of the {expert} expert: a file is missing\n"
        assert (folder / f"{name} 0.log").read_text().count(said) == 1
    at_the_end = {
        path: each for path, each in samples(folder, "experts").items() if "noise" not in str(path)
    }
    assert at_the_end and samples(folder, name) == at_the_end


def test_a_signal_to_one_rank_stops_both_after_the_same_step_with_a_save(folder):
    assert set(result(folder, "stopped")["codes"].values()) == {130}
    (step,) = saves(folder, "stopped")
    assert 2 <= step < STEPS
    assert f"stopped at step {step}, saved in" in (
        folder / "stopped 0.log"
    ).read_text() and not lines(folder, "stopped")


def test_the_first_rank_alone_decides_by_the_clock_when_both_save(folder):
    assert result(folder, "fast clock of 0") == result(folder, "fast clock of 1") == {"codes": {}}
    assert saves(folder, "fast clock of 0") == [1, 2, 3, 4]
    assert saves(folder, "fast clock of 1") == [4]


@pytest.mark.parametrize(
    ("name", "rank", "step", "said"),
    [
        (
            "no memory",
            1,
            3,
            (
                r"out of memory \(CUDA out of memory. Tried to allocate 2.00 GiB\); without torchrun, "
                r"--plan shows"
            ),
        ),
        (
            "cannot save",
            0,
            4,
            r"cannot write .*step-000004: No space left on device; free some space",
        ),
        ("cannot read", 1, 4, r"a disk that is gone"),
        ("cannot sample", 1, 2, r"the sample of 'a dog' is not finite"),
    ],
)
def test_what_one_rank_cannot_do_is_one_line_that_names_it(folder, name, rank, step, said):
    (line,) = lines(folder, name)
    assert re.match(rf"error: rank {rank} of 2 on \S+ in step {step}: .*{said}", line)
    assert line.removeprefix("error: ") in result(folder, name)["said"], (
        "torchrun's summary has it, too"
    )
    assert saves(folder, name) == [2], "the save before it stays"


def test_a_held_out_loss_that_is_not_finite_on_one_rank_ends_both(folder):
    """Both have the loss of all clips, so that either of them says it."""
    (line,) = lines(folder, "cannot measure")
    assert re.match(
        r"error: rank [01] of 2 on \S+ in step 4: the loss after step 4 is not finite at held-out "
        r"clip",
        line,
    )
    assert line.removeprefix("error: ") in result(folder, "cannot measure")["said"]
    assert (
        saves(folder, "cannot measure") == [2]
        and "step-000002: lower optim.lr, and resume from it" in line
    )


@pytest.mark.parametrize(
    "name", ["killed", "killed divided", "killed elsewhere", "killed slowly elsewhere"]
)
def test_a_killed_rank_is_named_by_the_other_one_and_in_the_summary(folder, name):
    """torchrun sends SIGTERM to the rank that is left, which is no wish to save, and does not
    replace its line. Exchanges may be FSDP2's own."""
    (line,) = lines(folder, name)
    host = "elsewhere" if name.endswith("elsewhere") else socket.gethostname()
    assert line.startswith(f"error: rank 1 of 2 on {host} in step 3: it was killed or crashed (")
    assert line.endswith("; the same command continues from the last save")
    ended = result(folder, name)
    # torchrun has one process, the one that it saw end first.
    assert (ended["codes"], "(SIGKILL)" in ended["said"]) in (({"1": -9}, True), ({"0": 1}, False))
    assert f"traceback : {line.removeprefix('error: ')}\n" in ended["said"]
    assert saves(folder, name) == [2]


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="the other rank finds the stopped one in /proc"
)
def test_a_stopped_rank_is_named_and_ended_by_the_other_one(folder):
    """torchrun would send SIGTERM, which waits until the process runs again, and kill it half a
    minute later."""
    (line,) = lines(folder, "stopped for ever")
    assert re.match(
        r"error: rank 1 of 2 on \S+ in step [23]: no heartbeat for 10 s \(ranks.timeout\): it hangs",
        line,
    )
    assert result(folder, "stopped for ever")["killed"] == []
    assert (
        f"traceback : {line.removeprefix('error: ')}\n"
        in result(folder, "stopped for ever")["said"]
    )


def test_a_bug_on_one_rank_is_one_line_before_its_traceback(folder):
    """Python prints the traceback where nothing takes the exception. Which of both torchrun's
    summary has depends on the second of the clock."""
    line, first = lines(folder, "bug")
    assert re.match(
        r"error: rank 1 of 2 on \S+ in step 3: unexpected ValueError: a bug; the traceback says",
        line,
    )
    assert first == "Traceback (most recent call last):"
    assert (folder / "bug 1.log").read_text().endswith("\nValueError: a bug\n")
    assert result(folder, "bug")["codes"] in ({"1": 1}, {"0": 1}), (
        "torchrun names the process that it saw end first"
    )


def test_the_same_command_generates_the_preview_that_one_rank_could_not(folder):
    """A sample of it is there, and its list is not."""
    assert not list((folder / "cannot sample").glob("samples/step-000002.json"))
    assert result(folder, "sampled again") == {"codes": {}}, lines(folder, "sampled again")
    assert samples(folder, "sampled again") == samples(folder, "alone")


def test_the_same_command_generates_the_class_images_that_one_rank_could_not(folder):
    (line,) = lines(folder, "no class image")
    assert re.match(
        r"error: rank 1 of 2 on \S+: an image of 'a class' is not finite: the base's weights are "
        r"broken",
        line,
    )
    assert not list((folder / "no class image").glob("prior/class-00001.*"))
    assert result(folder, "class images again") == {"codes": {}}, lines(
        folder, "class images again"
    )
    assert samples(folder, "class images again") == samples(folder, "alone")


def test_class_images_that_ranks_do_not_share_are_refused(folder):
    """Each rank writes its own: with folders of their own, ranks would train on other images, and
    wait for each other where they count more."""
    (line,) = lines(folder, "apart")
    assert "than rank 0; set prior.folder to a folder that all machines share" in line
    assert not list(folder.glob("**/classes apart/*")), "before any is generated"
    (line,) = lines(folder, "old list")
    assert "has another set of class images" in line
    assert saves(folder, "apart") == saves(folder, "old list") == []


def test_a_rank_without_room_to_decode_takes_tiles_and_the_list_of_samples_says_so(folder):
    """Of each preview and of the samples at the end, where the second rank tries the whole sample
    again."""
    name = "no room to decode"
    assert result(folder, name) == {"codes": {}}, lines(folder, name)
    for step in (0, 2, 4):
        listed = json.loads((folder / name / f"samples/step-{step:06d}.json").read_text())[
            "samples"
        ]
        assert [each["decoded"] for each in listed] == ["whole", "in bf16 tiles", "whole"]


def test_a_loss_that_is_not_finite_on_one_rank_ends_both_with_its_evidence(folder):
    (line,) = lines(folder, "not finite")
    (file,) = (folder / "not finite").glob("failure-step-*.json")
    assert str(file) in line and saves(folder, "not finite") == [2]
    assert line.removeprefix("error: ") in result(folder, "not finite")["said"]
    evidence = json.loads(file.read_text())
    broken = [sample["micro_batch"] for sample in evidence["samples"] if sample["loss"] == "nan"]
    assert broken == [1, 2] and len(evidence["samples"]) == 3, (
        "of three micro-batches, those of the second rank"
    )
    assert evidence["where"]["micro_batch"] == 1


def test_a_mistake_of_both_ranks_is_one_line_of_one_and_in_the_summary(folder):
    (line,) = lines(folder, "too few")
    assert re.match(
        r"error: rank [01] of 2 on \S+: train.accumulation = 1 makes 1 micro-batch a step in all, "
        r"too few",
        line,
    )
    assert "set train.accumulation to 2" in line
    ended = result(folder, "too few")
    assert f"traceback : {line.removeprefix('error: ')}\n" in ended["said"]
    assert list(ended["codes"].values()) == [1]
    printed = "".join((folder / f"too few {rank}.log").read_text() for rank in range(2))
    assert "UserError" not in printed + ended["said"] and "NoneType" not in printed + ended["said"]
    assert not (folder / "too few" / "state").exists()


def test_ranks_with_other_settings_are_refused_before_anything_is_written(folder):
    (line,) = lines(folder, "other flags")
    assert re.search(r"rank 1 on \S+ has another train.seed \(7\) than rank 0 on \S+ \(0\)", line)
    assert line.removeprefix("error: ") in result(folder, "other flags")["said"]
    assert not (folder / "other flags").exists()


def test_ranks_with_other_options_are_refused_before_anything_is_written(folder):
    """They are in no configuration: one machine's line lacks --init-from."""
    (line,) = lines(folder, "other start")
    assert re.search(
        r"rank 1 on \S+ has another set of options \(none\) than rank 0 on \S+ \(--init-from "
        r"alone\); start every rank with",
        line,
    )
    assert not (folder / "other start").exists()


@pytest.mark.parametrize(
    "name", ["data", "base", "torch version", "ditkit version", "kind of device"]
)
def test_ranks_with_something_else_are_refused_before_weights_are_read(folder, name):
    (line,) = lines(folder, f"other {name}")
    assert re.search(
        rf"rank 1 on \S+ has another {name} \(another\) than rank 0 on \S+ \(\S+\); start every "
        rf"rank with",
        line,
    )
    assert line.removeprefix("error: ") in result(folder, f"other {name}")["said"]
