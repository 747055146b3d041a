"""A package's names, imported from its modules when they are first used. Needs no torch."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's `__getattr__` and `__dir__`, so that `from package import name` works and `import
    package` stays fast.

    Args:
        package: Its `__name__`.
        modules: From name to the module of the package that defines it.
    """
    module = sys.modules[package]

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(modules))}"
            )
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(module, name, value)  # found without this function from now on
        return value

    return get, lambda: sorted({"__version__", *modules})
