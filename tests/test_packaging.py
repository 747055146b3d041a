"""Every distribution of the workspace, as metadata (default run) and as built, installed and
started wheels (slow)."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from workspace import CORE, MEMBERS, MODELS, ROOT, in_git, read_toml

UV = os.environ.get("UV") or shutil.which("uv")  # `uv run` says where it is
needs_uv = pytest.mark.skipif(UV is None, reason="needs uv on the PATH")

by_name = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)


def test_all_members_carry_one_version():
    for key in ("version", "requires-python"):
        assert {member.project[key] for member in MEMBERS} == {CORE.project[key]}


def test_every_model_package_asks_for_the_core_of_its_release():
    major, minor, _ = CORE.project["version"].split(".")
    for member in MODELS:
        assert f"ditkit-core~={major}.{minor}.0" in member.project["dependencies"]


def test_the_folders_that_the_page_gives_to_pip_cover_each_other():
    """pip knows no workspace: a member that one of them asks for has to be named too."""
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    (first, second) = re.search(r"^pip install (\S+) (\S+)", page, re.MULTILINE).groups()
    alternatives = re.search(r"^pip install .*# or (.*)$", page, re.MULTILINE)[1].split(", ")
    for folder in (second, *alternatives):
        projects = [
            read_toml(ROOT / name / "pyproject.toml")["project"] for name in (first, folder)
        ]
        named = {project["name"] for project in projects}
        asked = {
            re.match(r"[\w-]+", line)[0] for project in projects for line in project["dependencies"]
        }
        assert {name for name in asked if name.startswith("ditkit-")} <= named, folder
    assert {second, *alternatives} == {f"./{member.folder.relative_to(ROOT)}" for member in MODELS}


def test_the_root_lists_no_model_package():
    """uv installs all members of a workspace whose root is no project, and finds them by their
    folder."""
    root = read_toml(ROOT / "pyproject.toml")
    assert "project" not in root
    assert root["tool"]["uv"]["workspace"]["members"] == ["shared", "packages/*", "ui"]
    assert root["tool"]["uv"]["sources"] == {CORE.name: {"workspace": True}}


@pytest.mark.parametrize("member", MODELS, ids=lambda member: member.name)
def test_every_command_starts_an_existing_function(member):
    model = member.name.removeprefix("ditkit-")
    assert set(member.commands) == {
        f"{model}-{stage}" for stage in ("train", "encode", "sample", "export", "watch", "caption")
    }
    for target in member.commands.values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def run(
    *command: str | Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command outside the environment of the tests, with more variables set where given."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VIRTUAL_ENV", "PYTHON"))
    }
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        check=False,
        encoding="utf-8",
        env=environment | variables,
        cwd=cwd,
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """A folder with the source archive of every member and the wheel built out of it."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(UV, "build", "--all-packages", "--offline", "--out-dir", folder, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    return folder


def wheel_of(member, dist: Path) -> Path:
    (wheel,) = dist.glob(f"{member.package}-{member.project['version']}-py3-none-any.whl")
    return wheel


@needs_uv
@pytest.mark.slow
@by_name
def test_a_wheel_holds_every_file_of_its_source_and_nothing_else(member, dist):
    with zipfile.ZipFile(wheel_of(member, dist)) as wheel:
        names = {
            name
            for name in wheel.namelist()
            if not name.endswith("/") and ".dist-info/" not in name
        }
        licences = [
            name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")
        ]
        assert [wheel.read(name) for name in licences] == [(ROOT / "LICENSE").read_bytes()]
    files = {
        file
        for file in member.source.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert names == {file.relative_to(member.folder / "src").as_posix() for file in files}
    assert f"{member.package}/py.typed" in names


@needs_uv
@pytest.mark.slow
@by_name
def test_a_wheels_metadata_asks_for_releases_and_names_no_path(member, dist):
    with zipfile.ZipFile(wheel_of(member, dist)) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        fields = HeaderParser().parsestr(wheel.read(metadata).decode())
    required = fields.get_all("Requires-Dist")
    assert not [line for line in required if "@" in line or "://" in line]
    asked = {line.replace("_", "-") for line in member.project["dependencies"]}
    assert {line for line in required if "extra ==" not in line} == asked
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Version"] == CORE.project["version"]


@needs_uv
@pytest.mark.slow
@pytest.mark.timeout(600)
@by_name
def test_a_wheel_installs_alone_and_its_commands_answer(member, dist, tmp_path):
    if "\nsource = { editable" not in (ROOT / "uv.lock").read_text(encoding="utf-8"):
        pytest.skip("uv.lock is as git stores it, without the members: run `uv lock`")
    environment = tmp_path / "alone"
    # The locked dependencies of this member alone, out of uv's cache; then the built wheels in
    # place of the work tree.
    synced = run(
        UV, "sync", "--frozen", "--offline", "--no-dev", "--no-editable", "--package", member.name,
        cwd=ROOT, UV_PROJECT_ENVIRONMENT=str(environment), UV_PYTHON=sys.executable,
    )  # fmt: skip
    if "network was disabled" in synced.stderr:
        pytest.skip(
            f"uv's cache lacks what {member.name} needs: {synced.stderr.strip().splitlines()[-1]}"
        )
    assert synced.returncode == 0, synced.stderr
    wheels = [wheel_of(part, dist) for part in {CORE.name: CORE, member.name: member}.values()]
    installed = run(
        UV,
        "pip",
        "install",
        "--offline",
        "--no-deps",
        "--reinstall",
        "--python",
        environment,
        *wheels,
    )
    assert installed.returncode == 0, installed.stderr
    complete = run(UV, "pip", "check", "--python", environment)
    assert complete.returncode == 0, complete.stderr
    programs = environment / ("Scripts" if os.name == "nt" else "bin")

    modules = [
        ".".join(file.relative_to(member.folder / "src").with_suffix("").parts)
        for file in member.modules
    ]
    # `testing` is an extra: it needs pytest.
    modules = [module.removesuffix(".__init__") for module in modules if ".testing" not in module]
    others = [other.package for other in MODELS if other != member]
    script = (
        "import importlib, importlib.util\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"for name in {others!r}: assert importlib.util.find_spec(name) is None, name\n"
    )
    imported = run(programs / "python", "-c", script, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    for command in member.commands:
        answered = run(programs / command, "--help", cwd=tmp_path)
        assert answered.returncode == 0, answered.stderr
        assert command in answered.stdout


@needs_uv
@pytest.mark.slow
@pytest.mark.skipif(not in_git(), reason="not a git checkout")
def test_a_package_that_is_added_and_removed_changes_no_other_file(tmp_path):
    """The lock's list of members and the members' own entries are not stored, so git sees no
    difference."""
    clone = tmp_path / "clone"
    assert run("git", "clone", "--quiet", ROOT, clone).returncode == 0
    # This Python runs the filter: the test is about what it leaves, not about which uv is
    # installed.
    command = f'"{Path(sys.executable).as_posix()}" tools/index_neutral_lock.py'
    assert run("git", "config", "filter.index-neutral.clean", command, cwd=clone).returncode == 0
    shutil.copyfile(ROOT / "uv.lock", clone / "uv.lock")
    model = MODELS[0]
    added = clone / "packages" / "zed"

    def status() -> list[str]:
        locked = run(UV, "lock", "--offline", "--quiet", cwd=clone)
        assert locked.returncode == 0, locked.stderr
        assert run("git", "add", "uv.lock", cwd=clone).returncode == 0
        return run("git", "status", "--short", cwd=clone).stdout.splitlines()

    assert status() == []
    (added / "src" / "ditkit_zed").mkdir(parents=True)
    (added / "src" / "ditkit_zed" / "__init__.py").write_text('"""Zed."""\n', encoding="utf-8")
    (added / "README.md").write_text("# Zed\n", encoding="utf-8")
    project = (model.folder / "pyproject.toml").read_text(encoding="utf-8")
    name = model.name.removeprefix("ditkit-")
    (added / "pyproject.toml").write_text(project.replace(name, "zed"), encoding="utf-8")
    assert status() == ["?? packages/zed/"]
    assert '"ditkit-zed"' in (clone / "uv.lock").read_text(encoding="utf-8")
    shutil.rmtree(added)
    assert status() == []
