"""A full fine-tune whose weights are streamed, by the commands: trained, continued, sampled,
exported."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file
from toy_world import World, equal

from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY
from ditkit_core.training.checkpoint import load_state


def test_the_command_streams_a_full_fine_tune_bitwise(tmp_path, capsys):
    world = World(tmp_path, captions=0)
    world.spec = altered(
        TOY,
        names=replace(
            TOY.architecture.names,
            from_native={"official": TOY.architecture.names.from_native["official"]},
        ),
    )
    full = (
        "--adapter.method",
        "full",
        "--train.clip_norm",
        "0",
        "--optim.lr",
        "0.01",
        "--ema.decay",
        "0.9",
    )
    full += ("--held_out.clips", "1", "--save.every_steps", "1")
    fused = ("--optim.fused_backward", "true", "--train.checkpointing", "full")
    assert world.train("plain", 3, *full) == 0
    assert world.train("swapped", 1, *full, *fused, "--train.swap_blocks", "[2]") == 0
    assert (
        "2 blocks are streamed: 0.00 GiB of weights, and in training what the optimizer keeps of "
        "them," in capsys.readouterr().out
    )
    assert world.train("swapped", 3, *full, *fused, "--train.swap_blocks", "[1]") == 0
    saves = [
        load_state(tmp_path / name / "state" / "step-000003").tensors
        for name in ("plain", "swapped")
    ]
    assert saves[0].keys() == saves[1].keys() and all(
        equal(saves[0][group], saves[1][group]) for group in saves[0]
    )
    files = [
        sorted((tmp_path / name / "exports").rglob("transformer*/*.safetensors"))
        for name in ("plain", "swapped")
    ]
    exported = [{path.name: load_file(path) for path in found} for found in files]
    assert exported[0] and exported[0].keys() == exported[1].keys()
    assert all(equal(tensors, exported[1][name]) for name, tensors in exported[0].items())

    # what a later command takes of the run, streamed or not
    for name, count in (("one", "[2]"), ("other", "[0]")):
        drawn = (
            "--run.folder",
            str(tmp_path / "swapped"),
            "--prompt",
            "a cat",
            "--out",
            str(tmp_path / name),
        )
        assert world.run("sample", *full, *fused, "--train.swap_blocks", count, *drawn) == 0
    pictures = [
        [path.read_bytes() for path in sorted((tmp_path / name).iterdir())]
        for name in ("one", "other")
    ]
    assert pictures[0] and pictures[0] == pictures[1]

    capsys.readouterr()
    assert world.train("refused", 1, *full, "--train.swap_blocks", "[1]") == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "set optim.fused_backward = true" in line


@pytest.mark.parametrize(
    ("flags", "counts"),
    [
        (("--ema.decay", "0.9"), ("[0]", "[1]", "[2]")),
        (("--optim.name", "schedulefree_adamw"), ("[0]", "[1]")),
        (
            ("--optim.name", "adafactor", "--optim.fused_backward", "true")
            + ("--train.clip_norm", "0"),
            ("[0]", "[2]"),
        ),
    ],
    ids=["average", "schedulefree", "fused"],
)
def test_a_run_that_streamed_nothing_is_sampled_and_exported_streamed(
    flags, counts, tmp_path, capsys
):
    """What its optimizer is, and whether it steps in the backward, matters to training alone."""
    world = World(tmp_path, captions=0)
    world.spec = altered(
        TOY,
        names=replace(
            TOY.architecture.names,
            from_native={"official": TOY.architecture.names.from_native["official"]},
        ),
    )
    full = ("--adapter.method", "full", "--optim.lr", "0.01", *flags)
    assert world.train("run", 2, *full) == 0
    asked = ("--adapter.method", "full", "--run.folder", str(tmp_path / "run"))
    found = []
    for count in counts:
        to = tmp_path / count
        streamed = (*asked, "--train.swap_blocks", count)
        capsys.readouterr()
        assert world.run("sample", *streamed, "--prompt", "a cat", "--out", str(to)) == 0
        assert world.run("export", *streamed, "--out", str(to / "exported")) == 0
        said = capsys.readouterr().out
        assert (f"{count[1]} blocks are streamed" in said) == (count != "[0]")
        found.append(
            {
                path.relative_to(to): path.read_bytes()
                for path in sorted(to.rglob("*.*"))
                if path.is_file()
            }
        )
    assert {path.suffix for path in found[0]} >= {".png", ".safetensors"}
    assert all(found[0].keys() == other.keys() for other in found[1:])
    for path, content in found[0].items():
        if path.suffix == ".png":
            assert all(content == other[path] for other in found[1:])
        elif path.suffix == ".safetensors":
            plain, *others = (load_file(tmp_path / count / path) for count in counts)
            assert all(equal(plain, other) for other in others)
