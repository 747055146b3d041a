"""The generator of model packages: what it writes works as written. The slow test installs and
trains, as a stranger would."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from ditkit_core.diagnostics.report.overview import RANDOM_SAMPLES
from ditkit_core.errors import UserError
from ditkit_core.testing.filled_in import marks, next_step
from ditkit_core.testing.scripts import output_of
from new_model import KINDS, PARAMETERS, TEMPLATE, filled, main, ruff_options, write_package
from workspace import ROOT

UV = shutil.which("uv")
CHECKS = (
    "(TestZed or TestRedFox) and (test_it_builds_on_meta or test_carries or test_every_parameter "
    "or test_names_go or test_an_item_that or test_the_stream)"
    " or test_parameters or test_what_is_to_be"
)
"""A few checks of each kind, for every change: the slow test runs all of them."""


@pytest.fixture(scope="module", params=sorted(KINDS))
def package(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The kind, and the folder of a standalone package of that kind."""
    return request.param, write_package(
        "zed", request.param, tmp_path_factory.mktemp(request.param) / "zed"
    )


def run(package: Path, *arguments: str, seconds: int = 250) -> str:
    """Run Python in a package, which is importable, and return what it printed."""
    variables = os.environ | {"PYTHONPATH": str(package / "src")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env=variables,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def printed_by(program: str, folder: Path, *packages: Path) -> str:
    """What a program prints that imports packages; in a copy of a process that has imported what
    they import."""
    script = folder / "program.py"
    script.write_text(
        f"import sys\nsys.path[:0] = {[str(package / 'src') for package in packages]}\n{program}\n",
        encoding="utf-8",
    )
    return output_of(script)


def test_what_is_written_is_checked_as_our_own_code_is(package: tuple[str, Path]) -> None:
    _, folder = package
    config = ruff_options("zed")
    for command in (["check", *config], ["format", "--check", *config]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "src", "tests"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    for file in folder.rglob("*.py"):
        ast.parse(file.read_text(encoding="utf-8"))
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)
    assert "ditkit-core[testing]" in project["dependency-groups"]["dev"] and "workspace" not in text
    assert not any("testing" in requirement for requirement in project["project"]["dependencies"])
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    assert project["tool"]["uv"]["dependency-metadata"] == ours["dependency-metadata"]
    core = project["tool"]["uv"]["sources"]["ditkit-core"]
    assert core["editable"] and (folder / core["path"]).resolve() == ROOT / "shared"


def test_a_few_checks_pass_as_written(tmp_path: Path) -> None:
    """Of both kinds, and of a name of one word and one of two, in one process."""
    folders = [
        write_package(name, kind, tmp_path / name)
        for name, kind in zip(("zed", "red-fox"), sorted(KINDS), strict=True)
    ]
    tests = [str(folder / "tests") for folder in folders]
    arguments = ["-q", "-s", "-p", "no:cacheprovider", "-k", CHECKS, *tests]
    program = (
        f"import os, pytest\nos.chdir({str(folders[0])!r})\nsys.exit(pytest.main({arguments}))"
    )
    printed = printed_by(program, tmp_path, *folders)
    assert f"{2 * 8} passed" in printed
    for module in ("zed", "red_fox"):
        assert f"next: step 1 of the guide, src/ditkit_{module}/presets.py:3" in printed


def test_the_comparison_with_diffusers_has_inputs_that_the_model_takes(
    package: tuple[str, Path], tmp_path: Path
) -> None:
    _, folder = package
    program = (
        "import torch; from ditkit_zed.spec import ZED; from ditkit_zed.verify import DIFFUSERS;"
        "from ditkit_core.models.precision import Precision;"
        "arch = ZED.architecture.presets['two-blocks']; model = ZED.architecture.build(arch, "
        "Precision(matmul=torch.float32));"
        "inputs = DIFFUSERS.inputs(model); (velocity,) = model(inputs);"
        "print(velocity.shape == inputs.latents[0].shape, DIFFUSERS.config(arch)['num_layers'] == "
        "arch.layers)"
    )
    assert printed_by(program, tmp_path, folder) == "True True\n"


def test_the_commands_as_written_outlive_one_more_command_of_the_core(
    package: tuple[str, Path],
) -> None:
    more = (
        "from ditkit_core.commands import cli as core; core.OPTIONS['more'] = object; "
        "from ditkit_zed import cli; print(cli.caption.args[1])"
    )
    assert run(package[1], "-c", more).split()[-1] == "caption"


def test_the_marks_say_in_which_order_the_work_is_done(package: tuple[str, Path]) -> None:
    _, folder = package
    marked = marks(folder)
    assert [step for step, *_ in marked] == sorted(step for step, *_ in marked)
    assert {step for step, *_ in marked} == set(range(1, 9)) and all(task for *_, task in marked)
    guide = (ROOT / "docs" / "adding_a_model.md").read_text(encoding="utf-8")
    assert all(f"\n## {step}. " in guide for step in range(1, 9))
    for file in folder.rglob("*.*"):
        if file.suffix in (".py", ".md", ".toml"):
            file.write_text(
                file.read_text(encoding="utf-8").replace("FILL IN", "FILLED IN"), encoding="utf-8"
            )
    assert next_step(folder) == "every place is filled in"


def test_the_title_of_the_longest_name_is_underlined_to_its_end() -> None:
    """A shorter line is a warning of the site, which has none."""
    text = (TEMPLATE / "api.txt").read_text(encoding="utf-8")
    title, line, *_ = filled(text, "abcdefghijklmnopqrst", {}).splitlines()
    assert title.endswith("Abcdefghijklmnopqrst") and set(line) == {"="}
    assert len(line) >= len(title)


def test_a_name_of_several_words_is_written_as_each_place_has_it(tmp_path: Path) -> None:
    folder = write_package("red-fox", "image", tmp_path / "new")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (
        project["name"] == "ditkit-red-fox"
        and project["scripts"]["red-fox-train"] == "ditkit_red_fox.cli:train"
    )
    # The spec is found, and the command's name is the family's.
    program = "from ditkit_red_fox import RED_FOX; from ditkit_red_fox.cli import FAMILY; print(RED_FOX.name == FAMILY.name, RED_FOX.name)"
    assert printed_by(program, tmp_path, folder) == "True red-fox\n"
    other = write_package("red_fox", "image", tmp_path / "other")
    written = {
        path.relative_to(other): path.read_bytes() for path in other.rglob("*") if path.is_file()
    }
    assert written and all((folder / path).read_bytes() == text for path, text in written.items())


@pytest.mark.parametrize("name", ["Zed", "z", "core", "a-", "a--b", "9z", "x" * 30])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot name a family"):
        write_package(name, "image", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_existing_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    assert main(["zed", "--kind", "image", "--standalone", str(tmp_path)]) == 1
    assert "exists; choose another name" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
@pytest.mark.skipif(UV is None, reason="needs uv")
def test_a_standalone_package_installs_trains_and_is_tested_from_wheels_alone(
    tmp_path: Path,
) -> None:
    """In an environment of the built wheels and of the libraries of this one, without this
    workspace; the metadata names no path."""
    folder, wheels, environment = (tmp_path / name for name in ("zed", "wheels", "environment"))
    write_package("zed", "image", folder)
    programs = environment / ("Scripts" if os.name == "nt" else "bin")

    def ran(*command: Path | str, place: Path = tmp_path) -> str:
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, encoding="utf-8", check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    build = (str(UV), "build", "--offline", "--wheel", "--out-dir", wheels)
    ran(*build, "--package", "ditkit-core", place=ROOT)
    ran(*build, place=folder)
    ran(str(UV), "venv", "--offline", "--python", sys.executable, environment)
    install = (str(UV), "pip", "install", "--offline", "--no-deps", "--python", programs / "python")
    ran(*install, *wheels.glob("*.whl"))
    installed = Path(
        ran(
            programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
        ).strip()
    )
    # Libraries alone: what installs this workspace there are .pth files, which are not read here.
    libraries = sysconfig.get_path("purelib")
    (installed / "libraries.pth").write_text(libraries, encoding="utf-8")
    (metadata,) = installed.glob("ditkit_zed-*.dist-info/METADATA")
    required = re.findall(
        r"^Requires-Dist: (.+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert "ditkit-core~=0.1.0" in required and not [
        line for line in required if "@" in line or "/" in line
    ]
    program = "import ditkit_core, ditkit_zed, importlib.util as find; print(ditkit_core.__file__, ditkit_zed.__file__, find.find_spec('ditkit_wan'))"
    printed = ran(programs / "python", "-c", program)
    assert printed.count(str(installed)) == 2 and printed.split()[-1] == "None"
    tests = ("-q", "-s", "-p", "no:cacheprovider", "-k", CHECKS, "tests")
    assert "8 passed" in ran(programs / "python", "-m", "pytest", *tests, place=folder)
    run_folder = tmp_path / "run"
    printed = ran(programs / "zed-train", "--demo", "--run.folder", str(run_folder))
    assert "validation loss fell" in printed
    assert (run_folder / "exports" / "run.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_package_trains_resumes_exports_samples_and_passes_every_default_check(
    kind: str, tmp_path: Path
) -> None:
    folder = write_package("zed", kind, tmp_path / "zed")
    run_folder = tmp_path / "run"
    arguments = ["-m", "ditkit_zed.train", "--demo", "--run.folder", str(run_folder)]
    printed = run(folder, *arguments, seconds=600)
    assert "validation loss fell" in printed
    assert all(
        RANDOM_SAMPLES in text
        for text in (printed, (run_folder / "report.html").read_text(encoding="utf-8"))
    )
    assert (run_folder / "exports" / "run.safetensors").exists()
    assert list((run_folder / "samples").glob(f"*.{KINDS[kind]['SUFFIX']}"))
    run(folder, *arguments, "--train.steps", "62", seconds=600)
    assert (run_folder / "state" / "step-000062").is_dir()
    steps = [
        json.loads(line)["step"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[-1] == 62
    run(
        folder,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--timeout",
        "600",
        "tests",
        seconds=2400,
    )
    assert PARAMETERS > 0
