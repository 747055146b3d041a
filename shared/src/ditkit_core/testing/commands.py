"""The checks of every package's commands: they answer requests that need no model before slow
imports."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import ditkit_core
from ditkit_core.commands.options import OPTIONS
from ditkit_core.models.spec import ModelSpec

SLOW = (
    "accelerate",
    "av",
    "diffusers",
    "huggingface_hub",
    "peft",
    "tensorboard",
    "torchao",
    "transformers",
)
"""Libraries that take seconds to import."""

# One process for all calls: an import by one call is still visible in the next, so the order hides
# nothing.
_PROGRAM = """
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


def check_commands(name: str, package: str, folder: Path) -> None:
    """Assert that a package installs its commands and no others, and that they answer without slow
    imports.

    Args:
        name: The family's `ModelSpec.name`.
        package: The package's import name, such as `ditkit_wan`.
        folder: An empty folder.
    """
    commands = [f"{name}-{command}" for command in OPTIONS]
    installed = [
        script.name
        for script in entry_points(group="console_scripts")
        if script.module == f"{package}.cli"
    ]
    assert sorted(installed) == sorted(commands)
    for command in OPTIONS:
        (script,) = entry_points(group="console_scripts", name=f"{name}-{command}")
        assert script.attr == command, f"{script.name} calls {script.attr}"

    family = script.load().args[0]
    spec = family.spec()
    assert ModelSpec.at(spec.import_path) is spec, "another process finds the same model"
    assert (family.name, family.presets, family.demo) == (
        spec.name,
        tuple(spec.architecture.presets),
        spec.demo.config,
    )
    (folder / "wrong.toml").write_text("[train]\nsteps = -1\n")
    arguments = json.dumps([str(folder), commands, SLOW])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arguments], capture_output=True, text=True, check=True
    )
    *lines, last = done.stdout.splitlines()
    statuses, imported = json.loads(last)
    assert statuses == {command: [0, 0, 2, 2, 2, 2, 2] for command in commands}
    assert imported == [], "imported before an error is reported"
    for command in commands:
        assert any(line.startswith(f"usage: {command}") for line in lines)
        assert any(line.startswith(f"{command} {ditkit_core.__version__} (torch") for line in lines)
    errors = done.stderr.splitlines()
    assert len(errors) == 5 * len(commands) and all(
        line.startswith("error: ") for line in errors
    ), errors
