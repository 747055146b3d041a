"""What is answered before torch is imported, which takes seconds: each in a process of its own, by
the modules that it has imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ditkit_core.testing.ranks import once

SLOW = {
    "torch",
    "numpy",
    "torchao",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "tensorboard",
    "av",
    "PIL",
} | {
    "huggingface_hub",
    "safetensors",
    "jaxtyping",
    "trackio",
}
# A process that has imported the commands is copied for each call, which is what a call of a new
# process has: starting that takes longer.
PROGRAM = """
import json, os, sys
from pathlib import Path
from ditkit_core.commands.cli import Family, start

def spec():
    raise SystemExit("the spec was asked for")

family = Family(name="toy", presets=("tiny",), demo=Path("demo/demo.toml"), spec=spec)
calls, slow = json.loads(sys.argv[1])
sys.modules["wandb"] = None  # it is not installed
os.chdir(sys.argv[2])
for number, (command, argv) in enumerate(calls):
    if not os.fork():
        for stream, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
        status = start(family, command, argv)
        print(json.dumps([status, sorted(set(slow) & sys.modules.keys())]), flush=True)
        os._exit(0)
    os.wait()
"""
ANSWERS = [
    ("train", ["--version"], 0, ""),
    ("train", ["--help"], 0, ""),
    ("train", ["--help", "train"], 0, ""),
    ("export", ["--help", "all"], 0, ""),
    ("train", ["--print-schema"], 0, ""),
    ("sample", [], 2, "name a run (toy-sample --run RUN --prompt TEXT), or a model and an adapter"),
    (
        "export",
        [],
        2,
        "name a run (toy-export --run RUN), or an adapter file (toy-export --adapter FILE",
    ),
    (
        "train",
        [
            "--print-config",
            "--train.checkpointing",
            "full, 0-9=attn_only(self)",
            "--optim.name",
            "muon",
        ],
        0,
        "",
    ),
    ("train", [], 2, "nothing to work on"),
    ("train", ["--adapter.rnak", "3"], 2, "unknown key --adapter.rnak"),
    ("train", ["typo.toml"], 2, "unknown section [trian] in typo.toml"),
    ("train", ["--train.steps", "x"], 2, "must be a whole number"),
    ("train", ["--train.checkpointing", "fulll"], 2, "did you mean full?"),
    ("train", ["--optim.name", "adam"], 2, "must be one of adamw"),
    ("train", ["--optim.name", "adafacto"], 2, 'not "adafacto"; did you mean adafactor?'),
    ("train", ["no.toml"], 2, "cannot read the run file no.toml"),
    ("train", ["--run", "nowhere"], 2, "nowhere is not the folder of a run"),
    ("train", ["--train.steps", "3"], 1, "data.folder is not set"),
    (
        "train",
        ["--model.preset", "tinny"],
        1,
        "model.preset = 'tinny' is unknown; did you mean tiny? Choose one of tiny",
    ),
    ("sample", ["--guidance", "4"], 2, "did you mean --sample.guidance?"),
    ("train", ["--data.folder", "clipz"], 1, "data.folder clipz does not exist"),
    ("encode", ["--data.folders", '["here", "clipz"]'], 1, "data.folders clipz does not exist"),
    (
        "train",
        ["--data.folder", "here", "--model.base", "./Wan"],
        1,
        "model.base = './Wan': there is no such file",
    ),
    (
        "train",
        ["--init-from", "runz", "--data.folder", "here"],
        1,
        "--init-from runz does not exist; did you mean run?",
    ),
    (
        "sample",
        ["--run", "run", "--adapter", "a.safetensors"],
        1,
        "there is no adapter file a.safetensors; correct the path",
    ),
    (
        "train",
        ["--run", "other"],
        1,
        "other is a run of wan: use wan-train, or choose another run.folder",
    ),
    (
        "sample",
        ["--run.folder", "other", "--prompt", "x"],
        1,
        "other is a run of wan: use wan-sample, or choose another",
    ),
    (
        "train",
        ["--data.folder", "here", "--log.tracker", "wandb"],
        1,
        'uv pip install "ditkit-toy[wandb]"',
    ),
    ("train", ["--log.tracker", "mlflow"], 2, "must be one of none, wandb, trackio"),
    (
        "train",
        ["--recipe", "charcter"],
        2,
        "--recipe charcter is unknown; did you mean character? All of them: --recipe",
    ),
    (
        "export",
        ["--inspect", "a.safetensors"],
        1,
        "there is no file a.safetensors to --inspect; correct the path",
    ),
    (
        "export",
        ["--inspect", "~nobody.at.all/a.safetensors"],
        1,
        "there is no file ~nobody.at.all/a.safetensors to",
    ),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what each call printed."""

    def make(folder: Path) -> str:
        (folder / "here").mkdir(parents=True)
        (folder / "run").mkdir()
        (folder / "run" / "config.toml").write_text("[adapter]\nrank = 4\n")
        (folder / "other").mkdir()
        (folder / "other" / "config.toml").write_text("[adapter]\nrank = 4\n")
        (folder / "other" / "about.json").write_text('{"model": {"family": "wan"}}')
        (folder / "recipes").mkdir()
        promise = 'goal = "character"\nmodel = "Toy"\ngpus = "8GiB"\nhours = 1\nsection = ""\n'
        (folder / "recipes" / "index.toml").write_text(f"[small]\n{promise}")
        (folder / "typo.toml").write_text("[trian]\nsteps = 3\n")
        given = json.dumps([[(command, argv) for command, argv, *_ in ANSWERS], sorted(SLOW)])
        subprocess.run([sys.executable, "-c", PROGRAM, given, str(folder)], check=True)
        return str(folder)

    return Path(once(tmp_path_factory.getbasetemp(), "cli_imports", make))


@pytest.mark.parametrize(
    "number", range(len(ANSWERS)), ids=lambda number: " ".join(ANSWERS[number][1])[:40]
)
def test_it_is_answered_before_anything_slow_is_imported(answers: Path, number: int) -> None:
    _, _, status, message = ANSWERS[number]
    out, err = ((answers / f"{number}.{kind}").read_text() for kind in ("out", "err"))
    assert json.loads(out.splitlines()[-1]) == [status, []], err
    assert message in err and err.count("\n") == (status != 0)
