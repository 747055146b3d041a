"""`train --recipe`: which recipe is chosen, the run file that it writes, and what it refuses."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toy_world import World

from ditkit_core.commands.cli import Family, start
from ditkit_core.commands.launch import launch_words
from ditkit_core.commands.recipe import gpus_for
from ditkit_core.config.resolve import resolve
from ditkit_core.config.toml import read_config_file
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.run.config import RunConfig
from ditkit_core.run.recipes import Recipe
from ditkit_core.testing.scripts import output_of

pytestmark = pytest.mark.usefixtures("equal_steps_are_profiled_once")

SUPPORT = Path(__file__).parent.parent / "support"
RECIPES = {
    "small": ("character", "8GiB", 3),
    "large": ("character", "24GiB", 5),
    "slow": ("character", "24GiB", 9),
} | {"two": ("long", "24GiB,16GiB", 2)}
"""Goal, GPUs and hours by name."""
STEP = """[model]
preset = "tiny"
dtype = "fp32"
[data]
height = 16
width = 16
frames = 1
"""
"""Of all recipes, and of the runs that the tests begin: most plans are of one step."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A folder with data, and a family's recipes in `recipes`."""
    monkeypatch.chdir(tmp_path)
    world, folder = World(tmp_path), tmp_path / "recipes"
    folder.mkdir()
    index = []
    for rank, (name, (goal, gpus, hours)) in enumerate(RECIPES.items(), 2):
        index.append(
            f'[{name}]\ngoal = "{goal}"\nmodel = "Toy"\ngpus = "{gpus}"\nhours = {hours}\nsection = "x"\n'
        )
        swap = f"[train]\nsteps = {100 * rank}\n"
        if "," in gpus:
            swap += 'devices = ["cuda:0", "cuda:1"]\nsplit_points = [1]\n'
        text = f'[run]\nfolder = "runs/{name}"\n{STEP}[adapter]\nrank = {min(rank, 3)}\n'
        (folder / f"{name}.toml").write_text(f"{text}{swap}[save]\nevery_steps = 10\n")
    index.append(
        '[ranks]\ngoal = "full"\nmodel = "Toy"\ngpus = "2x8GiB"\nprocesses = 2\nlink = "pcie"\n'
        'hours = 1\nsection = "x"\n'
    )
    (folder / "ranks.toml").write_text(
        f'[run]\nfolder = "runs/ranks"\n{STEP}[adapter]\nrank = 2\n'
        "[ranks]\nshard = 2\n[train]\nsteps = 2\naccumulation = 2\n[save]\nevery_steps = 10\n"
    )
    (folder / "index.toml").write_text("\n".join(index))
    return world


def train(world: World, *argv: str) -> int:
    family = Family(
        name="toy",
        presets=("tiny",),
        demo=world.folder / "demo" / "demo.toml",
        spec=lambda: world.spec,
        components=(),
    )
    return start(family, "train", argv)


def begin(world: World, *argv: str) -> int:
    """With the data of the world."""
    return train(world, "--recipe", *argv, *data_flags(world))


def data_flags(world: World) -> list[str]:
    flags = ["--model.transformer", str(world.folder / "toy.safetensors"), "--model.dtype", "fp32"]
    flags += [
        "--data.folder",
        str(world.folder / "clips"),
        "--data.height",
        "16",
        "--data.width",
        "16",
    ]
    return [*flags, "--data.frames", "1", "--log.tensorboard", "false", "--sample.steps", "2"]


@pytest.mark.parametrize(
    ("gpus", "name"), [("8GiB", "small"), ("rtx3060", "small"), ("24GiB", "large")]
)
def test_a_goal_takes_the_largest_that_fits_and_of_these_the_shortest(world, gpus, name, capsys):
    assert begin(world, "character", "--gpus", gpus) == 0
    said = capsys.readouterr().err
    assert f"recipe {name} (a character, Toy)" in said and "hours of training steps by plan" in said
    assert [path.name for path in Path("runs").iterdir()] == [name]
    # runs/NAME has no save
    assert "this machine has no GPU, so start it where there is one" in said
    assert [path.name for path in Path("runs", name).iterdir()] == ["recipe.toml"]


def test_the_written_file_has_the_recipe_and_what_the_command_line_sets(world):
    flags = ("--train.steps", "7", "--optim.lr", "0.003", "--write", "mine/run.toml")
    assert begin(world, "large", "--gpus", "24GiB", *flags) == 0
    written, recipe = (
        read_config_file(RunConfig, Path(path)) for path in ("mine/run.toml", "recipes/large.toml")
    )
    assert (
        written["train.steps"] == 7
        and written["optim.lr"] == 0.003
        and written["adapter.rank"] == 3
    )
    assert recipe.keys() <= written.keys()
    changed = {key for key in recipe if written[key] != recipe[key]}
    assert changed <= {"train.steps", "run.folder"}
    assert not Path("runs").exists()


def test_files_of_comfyui_are_part_of_the_written_file(world):
    """The toy's one file fits; of its encoders nothing is known."""
    folder = world.folder / "ComfyUI" / "models" / "diffusion_models"
    folder.mkdir(parents=True)
    (world.folder / "toy.safetensors").rename(folder / "some.safetensors")
    flags = ["--gpus", "8GiB", "--comfyui", "ComfyUI", "--data.folder", "clips"]
    flags += ["--data.height", "16", "--data.width", "16", "--data.frames", "1"]
    assert train(world, "--recipe", "small", *flags, "--write", "run.toml") == 0
    written = read_config_file(RunConfig, Path("run.toml"))
    assert written["model.transformer"] == "ComfyUI/models/diffusion_models/some.safetensors"


def test_it_is_trained_from_the_written_file_and_continued_by_the_same_command(world, capsys):
    flags = ("--gpus", "8GiB", "--train.device", "cpu", "--train.steps", "2")
    assert begin(world, "small", *flags) == 0
    run = next(path.parent for path in world.folder.rglob("recipe.toml"))
    assert (run / "exports" / f"{run.name}.safetensors").exists()
    first, again = resolve(RunConfig, stored=run), resolve(RunConfig, file=run / "recipe.toml")
    assert (
        replace(first.train, kernels=again.train.kernels) == again.train
        and first.adapter == again.adapter
    )
    capsys.readouterr()
    assert begin(world, "small", *flags) == 0
    assert "complete" in capsys.readouterr().out


def test_a_recipe_for_several_processes_is_planned_for_a_rank_and_started_by_torchrun(
    world, monkeypatch, capsys
):
    started = []

    def execv(program, words):
        started.append(words)
        raise SystemExit(0)  # nothing of this process runs on

    monkeypatch.setattr(os, "execv", execv)
    assert begin(world, "full", "--gpus", "3x8GiB") == 0
    said = capsys.readouterr().err
    file = next(world.folder.rglob("recipe.toml"))
    assert "torchrun --nproc-per-node 2 -m ditkit_toy.train runs/ranks/recipe.toml" in said
    assert " of 2, " in said, "memory of one of two ranks"
    assert started == [], "there is no GPU here"
    file.unlink()
    with pytest.raises(SystemExit):
        begin(world, "full", "--gpus", "2x8GiB", "--train.device", "cpu")
    (words,) = started
    assert words[0] == sys.executable
    assert Path(words[-1]).samefile(next(world.folder.rglob("recipe.toml")))
    assert words[words.index("--nproc-per-node") + 1] == "2"
    assert begin(world, "full", "--gpus", "8GiB") == 3, "for one GPU there is none"
    assert begin(world, "full", "--gpus", "2x2GiB") == 3
    assert "is for 2 × 2GiB; the smallest" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.ranks
def test_two_processes_train_a_recipe_and_continue_it_in_the_queue(
    world, tmp_path, monkeypatch, capsys
):
    """What takes the place of this process trains in forked ranks: torchrun's three processes
    import everything, and run once, for the queue."""
    program = SUPPORT / "queue_program.py"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "argv", [str(program)])
    started = []

    def execv(path, words):
        started.append(words)
        raise SystemExit(0)

    def steps() -> list[int]:
        rows = (tmp_path / "runs" / "ranks" / "metrics.jsonl").read_text().splitlines()
        sent = [json.loads(line) for line in rows if "sent_bytes" in line]
        assert sent[-1]["sent_bytes"] > 0
        return [row["step"] for row in sent]

    monkeypatch.setattr(os, "execv", execv)
    for _ in range(2):
        with pytest.raises(SystemExit):
            begin(world, "ranks", "--gpus", "2x8GiB", "--train.device", "cpu")
    words, again = started
    file = str(Path("runs", "ranks", "recipe.toml"))
    assert words == again == launch_words([sys.executable, str(program), file], 2)
    ranks = tmp_path / "ranks.py"
    ranks.write_text(
        f"import runpy, sys\nsys.argv = {[str(program), file]}\n"
        f"runpy.run_path({str(program)!r}, run_name='__main__')\n"
    )
    output_of(SUPPORT / "program_on_ranks.py", str(tmp_path), str(ranks))
    assert steps() == [1, 2]
    capsys.readouterr()
    assert train(world, file, "--train.steps", "3", "--queue", "add") == 0
    assert capsys.readouterr().out.endswith("--queue start --worker 0,1\n")
    worker = [sys.executable, str(program), "--queue", "start", "--until-empty"]
    done = subprocess.run(worker, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "ranks is complete" in done.stdout, done.stdout + done.stderr
    assert steps() == [1, 2, 3]


def test_nothing_is_overwritten(world, capsys):
    assert begin(world, "small", "--gpus", "8GiB") == 0
    file = next(world.folder.rglob("recipe.toml"))
    before = file.read_bytes()
    assert begin(world, "small", "--gpus", "8GiB", "--train.steps", "9") == 1
    assert "exists with other settings, and nothing is overwritten" in capsys.readouterr().err
    assert begin(world, "small", "--gpus", "8GiB", "--write", str(file)) == 1
    assert file.read_bytes() == before


def test_what_fits_no_gpu_writes_nothing(world, capsys):
    assert begin(world, "character", "--gpus", "6GiB") == 3
    assert (
        "no recipe for a character is for 6GiB; the smallest is small, for 8 GB"
        in capsys.readouterr().err
    )
    assert begin(world, "long", "--gpus", "2x16GiB") == 3
    assert begin(world, "small", "--gpus", "8GiB", "--train.reserve", "[6.7]") == 3
    assert "small does not fit" in capsys.readouterr().err
    assert not Path("runs").exists() and not list(world.folder.rglob("recipe.toml"))


def test_the_command_lines_preset_chooses_among_a_goals_recipes(world, capsys):
    assert train(world, "--recipe", "character", "--gpus", "24GiB", "--model.preset", "other") == 1
    assert "no recipe for a character is for model.preset = 'other'" in capsys.readouterr().err


def test_missing_data_is_said_before_anything_is_planned_or_written(world, capsys):
    assert train(world, "--recipe", "character", "--gpus", "24GiB", "--data.folder", "nowhere") == 1
    assert "data.folder nowhere does not exist" in capsys.readouterr().err
    recipe = world.folder / "recipes" / "large.toml"
    recipe.write_text(recipe.read_text().replace("[data]\n", '[data]\nfolder = "images"\n'))
    assert train(world, "--recipe", "character", "--gpus", "24GiB") == 1
    assert "needs your data: add --data.folder FOLDER" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_it_is_a_run_file_for_plans_and_printing(world, capsys):
    assert train(world, "--recipe", "character", "--gpus", "24GiB", "--plan") == 0
    assert "fits" in capsys.readouterr().out
    assert train(world, "--recipe", "slow", "--print-config", "--train.steps", "8") == 0
    said = capsys.readouterr().out
    assert "rank = 3" in said and "steps = 8" in said and not Path("runs").exists()


def test_a_list_has_a_line_for_each(world, capsys):
    assert train(world, "--recipe", "list", "--gpus", "rtx3060") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].endswith("on rtx3060") and rows[0].split()[0] == "recipe"
    assert [row.split()[0] for row in rows[1:-1]] == [*RECIPES, "ranks"]
    small, large = rows[1].split(), rows[2].split()
    assert (
        float(small[-3]) > 0
        and float(small[-1]) >= 0
        and large[-5:] == ["–", "–", "for", "24", "GB"]
    )
    assert train(world, "--recipe", "list", "--gpus", "24GiB,16GiB") == 0
    assert " + " in capsys.readouterr().out.splitlines()[-3]
    assert train(world, "--recipe", "list", "--gpus", "2x8GiB") == 0
    assert " 2 × 0." in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["charcter"], "--recipe charcter is unknown; did you mean character?"),
        (["x"], "--recipe x is unknown; give a goal (character, long, full) or a name."),
        (["small", "run.toml"], "leave one of them out"),
        (["small", "--run", "runs/x"], "leave one of them out"),
        (["small", "--demo"], "a recipe begins a run"),
    ],
)
def test_what_it_refuses(world, argv, said, capsys):
    assert train(world, "--recipe", *argv) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("promised", "present", "used"),
    [
        ("24GiB", "8GiB,24GiB", "24GiB"),
        ("24GiB", "8GiB", ""),
        ("2x24GiB", "24GiB", ""),
        ("24GiB,8GiB", "8GiB,12GiB,24GiB", "24GiB,12GiB"),
        ("24GiB,16GiB", "24GiB,12GiB", ""),
    ],
)
def test_the_largest_gpus_are_those_that_a_recipe_is_for(promised, present, used):
    recipe = Recipe(
        name="x", path=Path("x"), goal="style", model="", gpus=promised, hours=1, section=""
    )
    assert gpus_for(recipe, parse_gpus(present)) == (parse_gpus(used) if used else ())
