"""What is answered before torch is imported, which takes seconds: each in a process of its own, by the modules that it has imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = {"torch", "numpy", "torchao", "diffusers", "transformers", "peft", "accelerate", "tensorboard", "av", "PIL"} | {
    "huggingface_hub",
    "safetensors",
    "jaxtyping",
}
PROGRAM = """
import json, sys
from pathlib import Path
from ditkit_core.commands.cli import Family, start

def spec():
    raise SystemExit("the spec was asked for")

family = Family(name="toy", presets=("tiny",), demo=Path("demo.toml"), spec=spec)
command, argv, slow = json.loads(sys.argv[1])
status = start(family, command, argv)
print(json.dumps([status, sorted(set(slow) & sys.modules.keys())]))
"""
ANSWERS = [
    ("train", ["--version"], 0, ""),
    ("train", ["--help"], 0, ""),
    ("export", ["--help", "all"], 0, ""),
    ("train", ["--print-schema"], 0, ""),
    ("sample", [], 2, "name a run (toy-sample --run RUN --prompt TEXT), or a model and an adapter"),
    ("export", [], 2, "name a run (toy-export --run RUN), or an adapter file (toy-export --adapter FILE"),
    ("train", ["--print-config", "--train.checkpointing", "full, 0-9=attn_only(self)", "--optim.name", "muon"], 0, ""),
    ("train", [], 2, "nothing to work on"),
    ("train", ["--adapter.rnak", "3"], 2, "unknown key --adapter.rnak"),
    ("train", ["typo.toml"], 2, "unknown section [trian] in typo.toml"),
    ("train", ["--train.steps", "x"], 2, "must be a whole number"),
    ("train", ["--train.checkpointing", "fulll"], 2, "did you mean full?"),
    ("train", ["--optim.name", "adam"], 2, "must be one of adamw"),
    ("train", ["no.toml"], 2, "cannot read the run file no.toml"),
    ("train", ["--run", "nowhere"], 2, "nowhere is not the folder of a run"),
    ("train", ["--train.steps", "3"], 1, "data.folder is not set"),
    ("train", ["--data.folder", "clipz"], 1, "data.folder clipz does not exist"),
    ("encode", ["--data.folders", '["here", "clipz"]'], 1, "data.folders clipz does not exist"),
    ("train", ["--data.folder", "here", "--model.base", "./Wan"], 1, "model.base = './Wan': there is no such file"),
    ("train", ["--init-from", "runz", "--data.folder", "here"], 1, "--init-from runz is not there; correct the path"),
    (
        "sample",
        ["--run", "run", "--adapter", "a.safetensors"],
        1,
        "there is no adapter file a.safetensors; check the path",
    ),
    ("export", ["--inspect", "a.safetensors"], 1, "there is no file a.safetensors to --inspect; check the path"),
    ("export", ["--inspect", "~nobody.at.all/a.safetensors"], 1, "there is no file ~nobody.at.all/a.safetensors to"),
]


@pytest.mark.parametrize(("command", "argv", "status", "message"), ANSWERS, ids=lambda value: str(value)[:40])
def test_it_is_answered_before_anything_slow_is_imported(
    tmp_path: Path, command: str, argv: list[str], status: int, message: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("[adapter]\nrank = 4\n")
    (tmp_path / "typo.toml").write_text("[trian]\nsteps = 3\n")
    given = json.dumps([command, argv, sorted(SLOW)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [status, []], done.stderr
    assert message in done.stderr and done.stderr.count("\n") == (status != 0)
