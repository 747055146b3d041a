"""What the check of the kernels says of each kernel with a fault, under Triton's interpreter: a script, because that has to be chosen before
Triton is imported. The fault is a value of a result that is off by a hundredth, or a code or a bit that is off by one."""

import json
from collections.abc import Callable
from importlib import import_module
from unittest import mock

import torch
from tensor_cores import TensorCores
from torch import Tensor

from ditkit_core.nn import kernel_check
from ditkit_core.nn.context import as_on

WRITTEN = {"scaled": ("out",), "stochastic": (0,), "split": (0, 2), "restored": (0,)}
"""Arguments that functions without a result write, by place or name."""
FUNCTIONS = {
    "norm_rotation": ("forward", "backward"), "modulated_norm": ("forward", "backward"), "gated_unit": ("forward", "backward"),
    "lora_parts": ("factors", "products"), "dequantized": ("rows", "nf4"), "rounded_rows": ("codes_of_rows", "scaled"),
    "rounding": ("stochastic", "split", "restored"),
}  # fmt: skip


def spoilt(tensor: Tensor) -> None:
    """Change the largest value of a result, where there is one."""
    if tensor.numel():
        flat = tensor.view(-1)
        codes = flat.view(torch.int8) if flat.dtype.itemsize == 1 else flat
        place = int(codes.double().abs().argmax())
        codes[place] = codes[place] * 1.03 if codes.is_floating_point() else codes[place] - codes[place].sign()


def with_fault(function: Callable[..., object], name: str, which: int) -> Callable[..., object]:
    """A function that launches a kernel, with a fault in one of what it makes."""

    def run(*given: Tensor, **named: Tensor) -> object:
        results = function(*given, **named)
        made = results if isinstance(results, tuple) else (results,)
        if name in WRITTEN:
            made = tuple(named[each] if isinstance(each, str) else given[each] for each in WRITTEN[name])
        spoilt(made[which])
        return results

    return run


def results_of(module: str, name: str) -> int:
    if name in WRITTEN:
        return len(WRITTEN[name])
    several = (
        "factors",
        "products",
        "codes_of_rows",
        "norm_rotation.forward",
        "norm_rotation.backward",
        "modulated_norm.backward",
    )
    return 2 if name in several or f"{module}.{name}" in several else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    kernel_check._WIDTH, kernel_check._HEAD = 256, 64
    cpu, found = torch.device("cpu"), dict[str, str]()
    with as_on("cuda"), TensorCores():
        found["none"] = kernel_check.kernel_fault(cpu)
        for module, names in FUNCTIONS.items():
            place = import_module(f"ditkit_core.nn.kernels.{module}")
            for name in names:
                for which in range(results_of(module, name)):
                    faulty = with_fault(getattr(place, name), name, which)
                    with mock.patch.object(place, name, faulty):
                        found[f"{module}.{name} {which}"] = kernel_check.kernel_fault(cpu)
    print(json.dumps(found))
