"""The repository as the tests in this folder see it: members of the workspace and files that git
knows."""

import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from house_measures import File

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Member:
    """One distribution of the workspace."""

    folder: Path
    project: dict[str, Any]
    """The `[project]` table of its pyproject.toml."""

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def package(self) -> str:
        """Its import name."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.package

    @property
    def modules(self) -> list[Path]:
        return sorted(self.source.rglob("*.py"))

    @property
    def commands(self) -> dict[str, str]:
        return self.project.get("scripts", {})


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def members() -> list[Member]:
    """The core first, then the model packages, then the page."""
    folders = [
        ROOT / "shared",
        *sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml")),
        ROOT / "ui",
    ]
    return [Member(folder, read_toml(folder / "pyproject.toml")["project"]) for folder in folders]


@cache
def source(file: Path) -> File:
    """A module of ours, read and parsed once for all tests of a process."""
    return File.parse(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))


MEMBERS = members()
CORE, *MODELS, UI = MEMBERS


def in_git() -> bool:
    """Whether this is a git checkout; a source archive or a plain copy is not."""
    return (ROOT / ".git").exists() and shutil.which("git") is not None


@cache
def text_files() -> list[Path]:
    """Every text file that is, or would be, committed; without git, every text file outside hidden
    folders."""
    if in_git():
        listing = [
            "git",
            "-C",
            str(ROOT),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]
        names = subprocess.run(
            listing, capture_output=True, check=True, encoding="utf-8"
        ).stdout.split("\0")
        files = [ROOT / name for name in names if name]
    else:
        files = [
            file
            for file in ROOT.rglob("*")
            if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
        ]
    return sorted(
        file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:8192]
    )
