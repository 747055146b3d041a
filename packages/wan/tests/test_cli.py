"""Wan's commands answer what needs no model before anything that takes seconds to import is touched."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import ditkit_wan

COMMANDS = ("wan-encode", "wan-export", "wan-sample", "wan-train")
SLOW = ("accelerate", "av", "diffusers", "huggingface_hub", "peft", "tensorboard", "torchao", "transformers")

# One process for all: what one call imports is still there at the next, so that the order of the calls hides nothing.
PROGRAM = """
import json, sys
from importlib.metadata import entry_points
folder, commands, slow = json.loads(sys.argv[1])
calls = (["--help"], ["--version"], ["--adapter.rnak", "3"], ["--adapter.rank", "x"], [folder + "/no.toml"],
         [folder + "/wrong.toml"], [])
statuses, found = {}, set()
for name in commands:
    (script,) = entry_points(group="console_scripts", name=name)
    for arguments in calls:
        sys.argv = [name, *arguments]
        statuses.setdefault(name, []).append(script.load()())
        found |= set(slow) & sys.modules.keys()
print(json.dumps([statuses, sorted(found)]))
"""


def test_the_package_installs_these_commands_and_no_other():
    scripts = [script for script in entry_points(group="console_scripts") if script.value.startswith("ditkit_wan.")]
    assert sorted(script.name for script in scripts) == sorted(COMMANDS)


def test_help_version_and_mistakes_are_answered_before_slow_libraries_are_imported(tmp_path):
    (tmp_path / "wrong.toml").write_text("[train]\nsteps = -1\n")
    given = json.dumps([str(tmp_path), COMMANDS, SLOW])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, check=True)
    *said, last = done.stdout.splitlines()
    statuses, found = json.loads(last)
    assert statuses == {name: [0, 0, 2, 2, 2, 2, 2] for name in COMMANDS}
    assert found == []
    for name in COMMANDS:
        assert any(line.startswith(f"usage: {name}") for line in said)
        assert any(line.startswith(f"{name} {ditkit_wan.__version__} (torch") for line in said)
    errors = done.stderr.splitlines()
    assert len(errors) == 5 * len(COMMANDS) and all(line.startswith("error: ") for line in errors), errors
