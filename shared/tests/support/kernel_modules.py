"""The modules with Triton kernels, as they are found in their package, so that no test misses one."""

import pkgutil
from importlib import import_module
from types import ModuleType, SimpleNamespace

from ditkit_core.nn import kernels


def jit_functions(module: ModuleType) -> list[str]:
    """The names of the functions that Triton compiles."""
    return [name for name, value in vars(module).items() if type(value).__name__ == "JITFunction"]


def kernel_modules() -> SimpleNamespace:
    """The modules with such functions, by name; Triton has to be installed."""
    modules = [import_module(f"{kernels.__name__}.{each.name}") for each in pkgutil.iter_modules(kernels.__path__)]
    return SimpleNamespace(**{each.__name__.rpartition(".")[2]: each for each in modules if jit_functions(each)})
