"""What the check of the kernels says of each kernel with a fault, under Triton's interpreter: a
script, because that has to be chosen before Triton is imported."""

import json
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ditkit_core.nn import kernel_check
from ditkit_core.nn.context import as_on
from ditkit_core.nn.kernels.ops import IMPLEMENTATIONS
from ditkit_core.testing.interpreter import as_on_hopper, repair_interpreter
from ditkit_core.testing.kernel_calls import KernelCalls, results_of
from ditkit_core.testing.tensor_cores import TensorCores


class FirstParts(TorchDispatchMode):
    """Makes all parts of a LoRA's factors but the first zeros, as a compiler would that keeps a
    difference in fp32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.ditkit.factor_parts.default:
            args = [factor.bfloat16().float() for factor in args]
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    repair_interpreter()
    torch.set_num_threads(1)
    # No power of two, like Wan's: a kernel's tile is wider.
    kernel_check._TOKENS, kernel_check._WIDTH, kernel_check._HEAD = 2, 320, 64
    as_on_hopper()
    faults = {
        f"{name} {result}": KernelCalls(name, result)
        for name in IMPLEMENTATIONS
        for result in results_of(name)
    }
    for name in ("norm_rotation_backward", "affine_norm_backward"):
        faults[f"{name} of frozen weights"] = KernelCalls(name, of_frozen=True)
    cpu, found = torch.device("cpu"), dict[str, object]()
    with as_on("cuda"), TensorCores():
        for name, fault in {
            "none 0": KernelCalls(),
            **faults,
            "factor_parts first": FirstParts(),
        }.items():
            with fault:
                found[name] = kernel_check.compare_kernels(cpu).fault
    # Fewer products to a step than any GPU is known to add, with more bits than it keeps, make the
    # largest error.
    with as_on("cuda"), TensorCores(at_once=4, extra=2):
        (adapted,) = (
            case for case in kernel_check._cases(cpu, has_fp8=False) if case.name == "LoRA"
        )
        found["truncated sums"] = kernel_check.error_of(adapted)
    with as_on("cuda"), TensorCores(rounds_products=True):
        found["rounded products"] = kernel_check.compare_kernels(cpu)
    print(json.dumps(found))
