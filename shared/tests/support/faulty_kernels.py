"""What the check of the kernels says of each kernel with a fault, under Triton's interpreter: a script, because that has to be chosen before
Triton is imported."""

import json

import torch
from kernel_calls import KernelCalls, results_of

from ditkit_core.nn import kernel_check
from ditkit_core.nn.context import as_on
from ditkit_core.nn.kernels.ops import IMPLEMENTATIONS
from ditkit_core.testing.tensor_cores import TensorCores

if __name__ == "__main__":
    torch.set_num_threads(1)
    kernel_check._WIDTH, kernel_check._HEAD = 320, 64  # no power of two, like Wan's: a kernel's tile is wider
    faults = [("none", 0), *((name, result) for name in IMPLEMENTATIONS for result in results_of(name))]
    found = {}
    with as_on("cuda"), TensorCores():
        for name, result in faults:
            with KernelCalls(name, result):
                found[f"{name} {result}"] = kernel_check.kernel_fault(torch.device("cpu"))
    print(json.dumps(found))
