"""Packages whose names are imported when they are first used."""

import subprocess
import sys

import pytest

import ditkit_core

CODE = """
import sys, ditkit_core
assert "torch" not in sys.modules
ditkit_core.LoraConfig
assert "torch" not in sys.modules and "load" not in vars(ditkit_core)
assert "LoraConfig" in vars(ditkit_core)
import logging
assert logging.getLogger("torch.utils._pytree").filters, "libraries are hushed for every program"
import ditkit_core.diagnostics.report.server
assert "torch" not in sys.modules
"""


def test_the_package_a_name_and_the_server_of_a_runs_page_are_imported_without_torch() -> None:
    """The server listens at once; the first page that shows samples imports torch."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_name_that_was_used_is_the_packages_and_all_names_are_listed() -> None:
    for name in ("LoraConfig", "load"):
        assert getattr(ditkit_core, name) is vars(ditkit_core)[name]
        assert vars(ditkit_core)[name].__module__.startswith("ditkit_core.")
    assert dir(ditkit_core) == sorted(["__version__", *ditkit_core.__all__])


def test_a_name_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fit'; it has BlockEngine, Execution"):
        getattr(ditkit_core, "fit")  # noqa: B009
