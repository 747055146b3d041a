"""Tables of docs/ about dtypes: the places and presets, errors against fp64, the audit of the
demos; and the attention backends."""

import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.config.schema import field_docs
from ditkit_core.diagnostics.audit.audit import ACTING
from ditkit_core.diagnostics.audit.findings import Case, audit_from_json
from ditkit_core.diagnostics.audit.render import format_error
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.models.precision import (
    PLACES,
    Precision,
    PrecisionConfig,
    dtype_name,
    set_precision,
)
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.attention.backends import BACKENDS
from ditkit_core.testing.world import make_model
from ditkit_flux2.presets import Flux2Arch
from ditkit_wan.presets import WanArch
from doc_models import SPECS as EVERY_SPEC
from doc_planned import planned

SPECS = {spec.name: spec for spec in EVERY_SPEC}
NAMES = {
    "wan": "Wan",
    "flux2": "FLUX.2",
    "flux3": "FLUX.3",
    "krea2": "Krea 2",
    "ltx": "LTX-Video",
    "qwen": "Qwen-Image 2.1",
    "qwenimage": "Qwen-Image",
    "zimage": "Z-Image",
}
SMALL: Mapping[str, Any] = {
    "wan": WanArch(dim=256, ffn_dim=512, heads=2, layers=30, text_dim=64, text_tokens=32),
    "flux2": Flux2Arch(
        dim=256,
        heads=2,
        double_layers=5,
        single_layers=20,
        text_dim=64,
        text_tokens=32,
        guidance=False,
    ),
}
"""As deep as Wan 1.3B and FLUX.2 klein 4B, with heads of their width, and narrow."""
SIGMAS = (0.137, 0.391, 0.618, 0.873)
"""Noise levels of the samples whose errors are measured."""

CASES: Mapping[str, Mapping[str, Any]] = {
    "`default`": {},
    "`fast`": {"preset": "fast"},
    "`reference`": {"preset": "reference"},
    "`default`, residual bf16": {"residual": "bf16"},
    "`default`, timestep bf16": {"timestep": "bf16"},
    "every place bf16": dict.fromkeys((place for place in ACTING if place != "matmul"), "bf16"),
}


def backends() -> Iterator[str]:
    """The features of each attention backend, from the table that runs are checked against."""
    yield "| `train.attention` | trains | key mask | dropout | dtype | device | compute capability | needs |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, backend in BACKENDS.items():
        can = [
            "yes" if each else "no"
            for each in (backend.has_backward, backend.takes_mask, backend.takes_dropout)
        ]
        dtype = "bf16, fp16" if backend.half_only else "any"
        where = f"{' '.join(backend.devices) or 'any'} | {backend.capabilities}"
        yield f"| `{name}` | {' | '.join(can)} | {dtype} | {where} | {backend.module or ''} |"


def precision_of(family: str, **fields: Any) -> Precision:
    """The dtypes of a run with `model.dtype = "bf16"` and these keys of `[precision]`."""
    return PrecisionConfig(**fields).precision(torch.bfloat16, SPECS[family].precision.reference)


def places() -> Iterator[str]:
    """Every place, and the dtype that the presets for training give it where matmuls are bf16; then
    the details, which are the last paragraph of the docstring of `Precision`."""
    kinds = [precision_of("wan"), precision_of("wan", preset="fast")]
    yield "| place | what runs in it | `default` | `fast` |"
    yield "|---|---|---|---|"
    for place in (*PLACES[1:], PLACES[0]):
        words = field_docs(Precision)[place].rstrip(".")
        yield f"| `{place}` | {words} | {_dtypes(place, kinds)} |"
    yield ""
    *_, details = inspect.cleandoc(Precision.__doc__ or "").split("\n\n")
    yield from textwrap.wrap(" ".join(details.split()), 120)


def references() -> Iterator[str]:
    """The dtypes of the official code; families with the same ones share a column."""
    columns: dict[Precision, list[str]] = {}
    for family in SPECS:
        columns.setdefault(precision_of(family, preset="reference"), []).append(NAMES[family])
    yield f"| place | {' | '.join(' and '.join(names) for names in columns.values())} |"
    yield "|---|" + "---|" * len(columns)
    for place in (*PLACES[1:], PLACES[0]):
        yield f"| `{place}` | {_dtypes(place, columns)} |"


def _dtypes(place: str, kinds: Iterable[Precision]) -> str:
    return " | ".join(dtype_name(getattr(kind, place)) for kind in kinds)


def presets() -> Iterator[str]:
    """Errors against fp64 on small deep models with random weights, and the memory that blocks keep
    under `full` at full size."""
    heads = (
        f"{name}: {what}"
        for name in map(NAMES.__getitem__, SMALL)
        for what in ("velocity", "gradient", "kept under `full`")
    )
    yield f"| precision | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * 3 * len(SMALL)
    columns = {family: _errors(family) for family in SMALL}
    for name, fields in CASES.items():
        cells = []
        for family, errors in columns.items():
            cells += [f"{error:.1e}" for error in errors[name]]
            held = sum(
                cost.kept for cost in planned(family, "full", precision_of(family, **fields)).blocks
            )
            cells.append(f"{held / 2**30:.1f} GiB")
        yield f"| {name} | {' | '.join(cells)} |"


def _errors(family: str) -> dict[str, tuple[float, float]]:
    """Relative errors of velocity and of the gradient of a LoRA, by case."""
    torch.set_num_threads(1)
    spec, arch, adapter = SPECS[family], SMALL[family], AdapterConfig(rank=8)
    model: Any = make_model(spec, arch, dtype=torch.bfloat16, adapter=adapter)
    exact: Any = make_model(spec, arch, dtype=torch.float64, adapter=adapter)
    exact.load_state_dict(model.state_dict())
    exact.double()
    truth = _step(spec, exact, arch)
    found = {}
    for name, fields in CASES.items():
        set_precision(model, precision_of(family, **fields))
        made = _step(spec, model, arch)
        velocity, gradient = (
            float((a - b).norm() / b.norm()) for a, b in zip(made, truth, strict=True)
        )
        found[name] = velocity, gradient
    return found


def _step(spec: ModelSpec, model: Any, arch: Any) -> tuple[Tensor, Tensor]:
    """The velocity and all gradients, in one row each, in fp64."""
    random = torch.Generator().manual_seed(5)
    with torch.device("meta"):
        outline = spec.training.empty_item(arch, (9 if spec.data.frame_step else 1, 128, 128), [])
    items = [
        {key: torch.randn(value.shape,
        generator=random) if value.is_floating_point() else torch.zeros_like(value, device="cpu")
         for key, value in outline.items()}
        for _ in SIGMAS
    ]  # fmt: skip
    model.zero_grad(set_to_none=True)
    inputs = spec.training.make_inputs(
        [item["latents"] for item in items], torch.tensor(SIGMAS), items, 1.0
    )
    velocity = torch.cat([each.double().flatten() for each in model(inputs, engine=BlockEngine())])
    target = torch.randn(velocity.shape, generator=random, dtype=torch.float64)
    (velocity - target).square().mean().backward()
    gradients = [
        parameter.grad.double().flatten() for parameter in trainable_parameters(model).values()
    ]
    return velocity.detach(), torch.cat(gradients)


def audited(text: str) -> Iterator[str]:
    """The output of `--audit-precision --json`, without times, which mean nothing for such a small
    model."""
    findings = audit_from_json(json.loads(text))
    yield ". ".join(each[0].upper() + each[1:] for each in findings.notes) + "."
    yield ""
    yield f"| place | velocity | loss | gradient | {' | '.join(f'σ {name}' for name in findings.bin_names)} | others low |"
    yield "|---|" + "---:|" * (4 + len(findings.bin_names))
    rows = [
        (f"`{each.op_group}`", each.alone, format_error(each.all_but.overall.gradient))
        for each in findings.op_groups
    ]
    rows += [
        ("all of them", findings.all_lowered, ""),
        ("the demo itself, fp32", findings.as_run, ""),
    ]
    for name, case, others in rows:
        yield f"| {name} | {' | '.join(_cells(case))} | {others} |"


def _cells(case: Case) -> list[str]:
    overall = case.overall
    errors = [
        overall.velocity,
        overall.loss,
        overall.gradient,
        *(each.gradient for each in case.bins),
    ]
    return [format_error(error) for error in errors]
