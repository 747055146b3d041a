"""The work of a class of checks in a process of its own, which the class is imported into from its
file.

    python suite_process.py [ARGUMENTS] tests/test_conformance.py::TestReplicas [ARGUMENTS]

The process has no type-check hooks, which cost ranks time. What a class does is its method `work`.
"""

import importlib.util
import sys
from inspect import getfile
from pathlib import Path
from typing import Any, ClassVar

from ditkit_core.testing.world import ModelChecks

SUPPORT = "support"
"""The folder next to the tests from which they import modules by name."""


class ProcessChecks(ModelChecks):
    """Base of checks whose work runs once, in a process of its own: inherit, and define `work`."""

    script: ClassVar[Path | None] = None
    """A script that does the work instead of `work`."""

    @classmethod
    def work(cls) -> None:
        """Called in the process, with the other arguments in `sys.argv`."""
        raise NotImplementedError

    @classmethod
    def command(cls) -> tuple[Path, list[str]]:
        """The script, and the argument that names the class."""
        if cls.script is not None:
            return cls.script, []
        return Path(__file__), [f"{getfile(cls)}::{cls.__qualname__}"]

    @classmethod
    def work_name(cls) -> str:
        """The name of the work, unique in a run of tests."""
        return cls.script.stem if cls.script is not None else f"{cls.__module__}.{cls.__qualname__}"


def class_at(location: str) -> Any:
    """The class of a test file, as `file.py::Class` or `file.py::Class.Inner`. Modules of the
    nearest folder `support` can be imported by name."""
    file, _, name = location.rpartition("::")
    path = Path(file).resolve()
    supports = [parent / SUPPORT for parent in path.parents if (parent / SUPPORT).is_dir()]
    sys.path[:0] = [str(folder) for folder in supports[:1]]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


if __name__ == "__main__":
    (where,) = (argument for argument in sys.argv if "::" in argument)
    sys.argv.remove(where)
    class_at(where).work()
