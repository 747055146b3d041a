"""The modules with Triton kernels, as they are found in their package, so that no test misses
one."""

import pkgutil
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from ditkit_core.nn import kernels
from ditkit_core.nn.kernels.launch import Launcher


def kernels_of(module: ModuleType) -> list[tuple[Any, str]]:
    """The kernels of a module, and functions that they call: each as an attribute of the module, or
    of what launches it."""
    attributes: list[tuple[Any, str]] = []
    for name, value in vars(module).items():
        if isinstance(value, Launcher):
            attributes.append((value, "kernel"))
        elif type(value).__name__ == "JITFunction":
            attributes.append((module, name))
    return attributes


def kernel_modules() -> SimpleNamespace:
    """The modules with kernels, by name; Triton has to be installed."""
    modules = [
        import_module(f"{kernels.__name__}.{each.name}")
        for each in pkgutil.iter_modules(kernels.__path__)
    ]
    return SimpleNamespace(
        **{each.__name__.rpartition(".")[2]: each for each in modules if kernels_of(each)}
    )
