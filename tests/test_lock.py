"""The stored uv.lock pins versions and names no address; see tools/index_neutral_lock.py."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import index_neutral_lock
from index_neutral_lock import without_addresses
from workspace import MEMBERS, ROOT, in_git

FULL = """\
version = 1
requires-python = ">=3.11"

[manifest]
members = [
    "member",
]

[[package]]
name = "forked"
version = "1.0"
source = { registry = "https://index.example/simple" }
resolution-markers = [
    "python_full_version < '3.12'",
]
sdist = { url = "https://files.example/forked-1.0.tar.gz", hash = "sha256:00", upload-time = "2026-01-01T00:00:00Z" }
wheels = [
    { url = "https://files.example/forked-1.0-py3-none-any.whl", hash = "sha256:11" },
    { url = "https://files.example/forked-1.0-cp311-none-win_amd64.whl", hash = "sha256:22" },
]

[[package]]
name = "forked"
version = "2.0"
source = { registry = "https://index.example/simple" }
sdist = { url = "https://files.example/forked-2.0.tar.gz", hash = "sha256:33" }

[[package]]
name = "member"
version = "0.1.0"
source = { editable = "shared" }
dependencies = [
    { name = "user" },
]

[package.metadata]
requires-dist = [{ name = "user" }]

[[package]]
name = "user"
version = "3.0"
source = { registry = "https://index.example/simple" }
dependencies = [
    { name = "forked", version = "1.0", source = { registry = "https://index.example/simple" }, marker = "python_full_version < '3.12'" },
    { name = "forked", version = "2.0", source = { registry = "https://index.example/simple" }, marker = "python_full_version >= '3.12'" },
]
wheels = [
    { path = "../wheels/user-3.0-py3-none-any.whl" },
]

[package.optional-dependencies]
more = [
    { name = "forked", version = "2.0", source = { registry = "https://index.example/simple" } },
]
"""

NEUTRAL = """\
version = 1
requires-python = ">=3.11"

[manifest]

[[package]]
name = "forked"
version = "1.0"
source = { registry = "index" }
resolution-markers = [
    "python_full_version < '3.12'",
]

[[package]]
name = "forked"
version = "2.0"
source = { registry = "index" }

[[package]]
name = "user"
version = "3.0"
source = { registry = "index" }
dependencies = [
    { name = "forked", version = "1.0", source = { registry = "index" }, marker = "python_full_version < '3.12'" },
    { name = "forked", version = "2.0", source = { registry = "index" }, marker = "python_full_version >= '3.12'" },
]

[package.optional-dependencies]
more = [
    { name = "forked", version = "2.0", source = { registry = "index" } },
]
"""


def test_addresses_files_and_members_go_and_the_rest_stays_to_the_letter():
    assert without_addresses(FULL) == NEUTRAL


def test_filtering_twice_changes_nothing():
    assert without_addresses(NEUTRAL) == NEUTRAL


def test_an_address_that_cannot_be_dropped_is_an_error():
    pinned_to_git = FULL.replace(
        '{ registry = "https://index.example/simple" }', '{ git = "https://git.example/x#1" }', 1
    )
    with pytest.raises(ValueError, match=r"cannot make this line neutral.*git\.example"):
        without_addresses(pinned_to_git)


def test_the_lock_of_the_work_tree_keeps_every_pin_and_loses_the_members():
    full = (ROOT / "uv.lock").read_text(encoding="utf-8")
    neutral = without_addresses(full)
    own = {member.name for member in MEMBERS}
    pins = {(package["name"], package["version"]) for package in tomllib.loads(full)["package"]}
    kept = {(package["name"], package["version"]) for package in tomllib.loads(neutral)["package"]}
    assert kept == {(name, version) for name, version in pins if name not in own}
    assert len(kept) > 50  # this looked at the real thing
    assert "://" not in neutral
    assert without_addresses(neutral) == neutral


@pytest.mark.skipif(not in_git(), reason="not a git checkout: nothing is stored")
def test_the_lock_that_git_stores_carries_no_address():
    show = ["git", "-C", str(ROOT), "show", ":uv.lock"]
    stored = subprocess.run(show, capture_output=True, check=False, encoding="utf-8")
    assert stored.returncode == 0, (
        f"uv.lock is not in the index: git add uv.lock ({stored.stderr.strip()})"
    )
    assert "://" not in stored.stdout, (
        "run `python tools/index_neutral_lock.py --install`, then `git add uv.lock`"
    )
    assert stored.stdout == without_addresses(stored.stdout)


def test_the_attributes_name_the_filter_that_install_configures():
    attributes = (ROOT / ".gitattributes").read_text(encoding="utf-8")
    assert f"uv.lock filter={index_neutral_lock.ATTRIBUTE}" in attributes


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_stores_the_neutral_lock_and_leaves_the_file_alone(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    tool = tmp_path / "tools" / "index_neutral_lock.py"
    tool.parent.mkdir()
    shutil.copy(index_neutral_lock.__file__, tool)
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    subprocess.run([sys.executable, str(tool), "--install"], check=True)
    # The same filter, run by the Python of the tests: this test is about git, not about which uv is
    # installed.
    python = Path(sys.executable).as_posix()
    subprocess.run(
        [*git, "config", "filter.index-neutral.clean", f'"{python}" tools/index_neutral_lock.py'],
        check=True,
    )
    (tmp_path / "uv.lock").write_bytes(FULL.encode())
    subprocess.run([*git, "add", "uv.lock"], check=True)
    stored = subprocess.run([*git, "show", ":uv.lock"], capture_output=True, check=True).stdout
    assert stored == NEUTRAL.encode()
    assert (tmp_path / "uv.lock").read_bytes() == FULL.encode()
    changed = subprocess.run(
        [*git, "diff", "--name-only"], capture_output=True, check=True, encoding="utf-8"
    ).stdout
    assert changed == ""

    # A pin that cannot be neutral stops `git add`, so it cannot be committed by accident.
    (tmp_path / "uv.lock").write_bytes(
        FULL.replace('{ registry = "https://index', '{ git = "https://index', 1).encode()
    )
    refused = subprocess.run(
        [*git, "add", "uv.lock"], capture_output=True, check=False, encoding="utf-8"
    )
    assert refused.returncode != 0 and "cannot make this line neutral" in refused.stderr


def test_check_names_the_first_line_with_an_address(tmp_path, capsys):
    lock = tmp_path / "uv.lock"
    lock.write_text(NEUTRAL, encoding="utf-8")
    assert index_neutral_lock.main(["--check", str(lock)]) == 0
    lock.write_text(FULL, encoding="utf-8")
    assert index_neutral_lock.main(["--check", str(lock)]) == 1
    assert f"{lock}:12: the lock carries an address" in capsys.readouterr().err
