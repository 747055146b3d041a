"""Packages whose names are imported when they are first used."""

import subprocess
import sys

import pytest

import ditkit_core

CODE = """
import sys, {package}
assert "torch" not in sys.modules
{package}.{name}
assert {torch} == ("torch" in sys.modules)
assert {name!r} in vars({package}) and dir({package}) == sorted(["__version__", *{package}.__all__])
"""


def test_the_server_of_a_runs_page_starts_without_torch() -> None:
    """It listens at once; the first page that shows samples imports torch."""
    code = "import ditkit_core.diagnostics.report.server, sys; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "name", "torch"),
    [("ditkit_core", "LoraConfig", False), ("ditkit_core", "load", True)],
)
def test_a_package_is_imported_without_torch_and_a_name_with_what_it_needs(
    package: str, name: str, torch: bool
) -> None:
    code = CODE.format(package=package, name=name, torch=torch)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fit'; it has BlockEngine, Execution"):
        getattr(ditkit_core, "fit")  # noqa: B009
