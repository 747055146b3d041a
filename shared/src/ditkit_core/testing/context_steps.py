"""Steps of ranks that share each sample's tokens, held against one process: the work of a script
that `ContextConformance` starts once.

As in `replicas.py`, the script imports everything once, and forks the ranks of every world.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.distributed.ranks import Ranks
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.spec import ModelSpec
from ditkit_core.testing.replicas import CountedRanks, forked
from ditkit_core.testing.world import ADAPTERS, DTYPES, Items, largest, make_model, outcome

_DTYPES = {**DTYPES, "fp64": torch.float64}
SMALL = 0.01
"""Of the largest gradient: one that is smaller is a sum of terms that cancel, and has the roundings
of these."""


@dataclass(frozen=True)
class Subject:
    """A model and its inputs."""

    spec: ModelSpec
    arch: Any
    items: Items
    attentions: int
    """Calls of `attend` in a forward among all tokens of a sample."""
    gathers: int = 1
    """Fields of the carry that the head reads and that run along tokens."""


class ContextResult(TypedDict):
    """A step of a context group, next to the step of one process."""

    outputs: float
    """The largest distance of an output, relative to the largest value of it."""
    gradients: float
    """The largest distance of a gradient, relative to its norm, or to a hundredth of the largest
    gradient's."""
    exchanges: int
    """Of tokens, in the forward and backward."""
    needed: int
    """Exchanges of a step that repeats none: for the head, and for each attention in forward and
    backward."""
    repeated: int
    """Exchanges of a recompute of every attention."""


def steps(
    subjects: Mapping[str, Subject], chosen: Sequence[str], folder: Path, ranks: Ranks
) -> dict[str, ContextResult]:
    """One step of each subject, by `subject/trained/dtype/policy`, next to that of one process,
    which `write_references` left in the folder."""
    table = dict[str, ContextResult]()
    for case in chosen:
        start, _, policy = case.rpartition("/")
        subject, model, items = _made(subjects, start)
        expected = load_file(_reference(folder, start))
        counted = replace(ranks, exchanges=0) if isinstance(ranks, CountedRanks) else ranks
        streams = subject.spec.architecture.token_streams(subject.arch)
        assert streams is not None
        engine = BlockEngine(policy=policy, context=ContextParallel(counted, streams))
        result = outcome(subject.spec, model, items, engine)
        exchanges = counted.exchanges if isinstance(counted, CountedRanks) else 0
        # Tokens for heads and back; or keys and values.
        repeated = subject.attentions * (1 if subject.arch.heads % ranks.context else 2)
        outputs = (
            _apart(output, expected.pop(_OUTPUT.format(i)))
            for i, output in enumerate(result.outputs)
        )
        table[case] = ContextResult(
            outputs=largest(outputs),
            gradients=_gradients_apart(result.gradients, expected, ranks),
            exchanges=exchanges,
            needed=subject.gathers + 2 * repeated,
            repeated=repeated,
        )
    return table


def write_references(
    subjects: Mapping[str, Subject], starts: Iterable[str], folder: Path, _: Ranks
) -> None:
    """Outputs and gradients of one process, by `subject/trained/dtype`, for the ranks of every
    world to read: computing them in each rank took as long as the ranks' steps."""
    for start in starts:
        subject, model, items = _made(subjects, start)
        expected = outcome(subject.spec, model, items, BlockEngine())
        outputs = {
            _OUTPUT.format(i): x.detach().contiguous() for i, x in enumerate(expected.outputs)
        }
        gradients = {
            name: x.contiguous() for name, x in expected.gradients.items() if x is not None
        }
        save_file(outputs | gradients, _reference(folder, start))


_OUTPUT = "output {}"
"""Name of an output among gradients, which have those of parameters and `input 0`, …"""


def _reference(folder: Path, start: str) -> Path:
    return folder / f"{start.replace('/', ' ')}.safetensors"


def _made(subjects: Mapping[str, Subject], start: str) -> tuple[Subject, Any, Items]:
    name, trained, dtype = start.split("/")
    subject = subjects[name]
    model = make_model(subject.spec, subject.arch, dtype=_DTYPES[dtype], adapter=ADAPTERS[trained])
    return subject, model, _in_fp64(subject.items) if dtype == "fp64" else subject.items


def _in_fp64(items: Items) -> Items:
    """Items in fp64. Gradients have their input's dtype, and are rounded after a product with the
    number of ranks.

    With fp32 inputs, three ranks' gradients of inputs alone are 4e-8 from one process's.
    """
    return [
        {name: x.double() if x.is_floating_point() else x for name, x in item.items()}
        for item in items
    ]


def _apart(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def _gradients_apart(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor], ranks: Ranks
) -> float:
    pairs = [(expected[name], x) for name, x in actual.items() if x is not None]
    assert len(pairs) == len(expected), "a gradient of one process is none of the ranks"
    references = [full.double().flatten() for full, _ in pairs]
    # One exchange: each takes longer than these tiny steps.
    mean = ranks.mean_in_group(torch.cat([part.double().flatten() for _, part in pairs]))
    parts = mean.split([len(full) for full in references])
    floor = SMALL * max(full.norm() for full in references)
    return largest(
        float((part - full).norm() / torch.maximum(full.norm(), floor))
        for part, full in zip(parts, references, strict=True)
    )


POLICIES = ("none", "full", "attn_only", "full+offload", "attn_only+offload")


def few(subjects: Iterable[str]) -> dict[str, Sequence[int]]:
    """The daily cases of a family, by the sizes of their context groups; `odd`, `ragged` and `two
    heads` are among its subjects."""
    return {f"{name}/full/fp32/attn_only": (2,) for name in subjects} | {
        "odd/full/fp32/none": (2, 4),
        "ragged/lora/fp32/full": (2, 4),
        "two heads/full/fp32/full": (4,),
        "odd/lora/bf16/attn_only": (2,),
        "odd/lokr/fp32/full": (2,),
        "ragged/lora with dropout/fp32/attn_only": (2, 4),
        "ragged/loha/fp32/attn_only": (2,),
        "ragged/full/fp64/none": (2, 3),
    }


def every(subjects: Iterable[str], policies_of: Iterable[str]) -> dict[str, Sequence[int]]:
    """Every policy of some subjects, and adapters of all."""
    cases = {f"{name}/full/fp32/{policy}": (2, 4) for name in policies_of for policy in POLICIES}
    trained = ("lora/fp32", "lora/bf16", "lora with dropout/fp32")
    return cases | {
        f"{name}/{setting}/attn_only": (2, 3, 4) for name in subjects for setting in trained
    }


def main(subjects: Mapping[str, Subject], cases: Mapping[str, Sequence[int]]) -> None:
    """The work of a script.

    Args:
        subjects: By name.
        cases: `subject/trained/dtype/policy`, of `world.ADAPTERS` and `_DTYPES`, each with the
            sizes of context groups.
    """
    torch.set_num_threads(1)
    starts = list(dict.fromkeys(case.rpartition("/")[0] for case in cases))
    for start in starts:
        _made(subjects, start)  # also imports peft; the processes copy what was made here
    folder, tables = Path(sys.argv[1]), dict[str, Any]()
    forked(1, partial(write_references, subjects, starts, folder), folder / "one process")
    for num in sorted({num for sizes in cases.values() for num in sizes}):
        chosen = [case for case, sizes in cases.items() if num in sizes]
        work = partial(_grouped, subjects, chosen, folder)
        tables[str(num)] = forked(num, work, folder / f"context {num}")
    (folder / "context.json").write_text(json.dumps(tables))


def _grouped(
    subjects: Mapping[str, Subject], chosen: Sequence[str], folder: Path, ranks: Ranks
) -> dict[str, ContextResult]:
    return steps(subjects, chosen, folder, ranks.grouped(ranks.size))
