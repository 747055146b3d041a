"""Short training runs with the Triton kernels, by one process and by several ranks: the work of a
script that `KernelRanksConformance` starts.

The kernels run as on a GPU, but under Triton's interpreter. Its time goes by programs, whatever
their width, some 2 ms for each, and most kernels have a program for each token. So items have few
tokens.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ditkit_core.distributed.ranks import Ranks
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.context import as_on
from ditkit_core.testing.interpreter import repair_interpreter
from ditkit_core.testing.kernel_calls import KernelCalls
from ditkit_core.testing.replicas import Divided, Replicas, forked
from ditkit_core.testing.tensor_cores import TensorCores
from ditkit_core.testing.world import ADAPTERS, Items, make_model

ALONE = Divided(1, 1)
WORLDS = (
    Divided(2, 1, few=("brief lora", "brief lora on nf4")),
    Divided(2, 2),
    Divided(2, 1, context=2, few=("brief lora", "brief lora on nf4", "brief full")),
    Divided(4, 2, context=2, few=("brief full",)),
)
"""Replicas, ranks that divide the weights, ranks that share tokens, and both together."""
STEPS = 2


def main(spec: ModelSpec, arch: Any, items: Items, cases: Sequence[str]) -> None:
    """The work of a script: the cases with torch in one process, and with the kernels there and in
    every world. It prints what each rank launched.

    Args:
        spec: The model family.
        arch: A small architecture.
        items: Training samples.
        cases: Names of `BRIEF`.
    """
    repair_interpreter()
    torch.set_num_threads(1)
    # imports peft, which else each of the processes would do
    make_model(spec, arch, adapter=ADAPTERS["lora"])
    folder, launches = Path(sys.argv[1]), dict[str, Any]()
    plain = Replicas(spec, arch, items, folder / "torch", cases, held_out=(0,))
    fused = replace(plain, folder=folder / "triton", kernels="triton")
    for replicas, world in ((plain, ALONE), *((fused, world) for world in (ALONE, *WORLDS))):
        name = f"{replicas.kernels} on {world if world.size > 1 else 1}"
        launches[name] = forked(
            world.size, partial(_launches, replace(replicas, divided=world)), folder / name
        )
    print(json.dumps(launches))


def _launches(replicas: Replicas, ranks: Ranks) -> dict[str, list[str]]:
    """Train the cases of a world; the operations with kernels that ran on this rank, by case."""
    divided_ranks, launches, fused = replicas.of(ranks), {}, replicas.kernels == "triton"
    for name in replicas.divided.cases(replicas.cases):
        with ExitStack() as stack:
            calls = stack.enter_context(KernelCalls())
            if fused:
                stack.enter_context(as_on("cuda"))
                stack.enter_context(TensorCores())
            replicas.train(name, replace(divided_ranks), steps=STEPS)
        launches[name] = sorted(calls.names)
    return launches
