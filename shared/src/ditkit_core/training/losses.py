"""The losses of a step's samples, and what explains those that are not finite."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ditkit_core.io.files import write_text
from ditkit_core.training.nan_debug import describe_nonfinite


@dataclass(frozen=True)
class Losses:
    """Samples, noise levels and losses of this rank's micro-batches, which explain a failure."""

    first: int
    """Number of the first of them within the step."""
    ids: list[Sequence[str]]
    sigmas: list[Tensor]
    weighted: list[Tensor]
    """Loss of each sample, float32 [batch] per micro-batch."""


class NonFiniteLoss(Exception):
    """A loss or gradient that is infinite or NaN. Weights and optimizer are as before the step.

    The exception is `optim.fused_backward`: it may find a non-finite gradient after some parameters
    were updated. Then only the last save is valid.

    Attributes:
        evidence: Details for JSON: samples, losses, and the first operation with a non-finite
            result.
    """

    def __init__(self, evidence: dict[str, Any]):
        message = f"the loss or gradient of step {evidence['step']} is not finite"
        if where := evidence.get("where"):
            message += f" ({describe_nonfinite(where)}; samples {', '.join(where['ids'])})"
        elif reason := evidence.get("where_not_found"):
            message += f" (its origin was not found: {reason})"
        if updated := evidence.get("num_parameters_updated_before"):
            message += f" and {updated} parameters were updated before it was found"
            message += (
                ", also before its origin was looked for, so that only the last save is valid"
            )
        super().__init__(message)
        self.evidence = evidence


def evidence_of(
    step: int, losses: Losses, broken: Sequence[str], *, loss: float, grad_norm: float
) -> dict[str, Any]:
    """The details of a failure; non-finite numbers are written as text, because JSON has none."""
    samples = [
        {
            "micro_batch": micro,
            "id": name,
            "sigma": float(level),
            "loss": _number(float(weighted_loss)),
        }
        for micro, (ids, sigma, weighted) in enumerate(
            zip(losses.ids, losses.sigmas, losses.weighted, strict=True), losses.first
        )
        for name, level, weighted_loss in zip(ids, sigma, weighted, strict=True)
    ]
    return {
        "step": step,
        "loss": _number(loss),
        "grad_norm": _number(grad_norm),
        "samples": samples,
        "num_parameters_with_non_finite_gradients": len(broken),
        # a full fine-tune has thousands of parameters, and ten names are enough
        "first_parameters_with_non_finite_gradients": broken[:10],
    }


def write_failure(
    error: NonFiniteLoss, folder: Path, lr: float, save: Path | None, family: str
) -> str:
    """Write the evidence of a loss that is not finite to a file, and return the message that names
    it."""
    file = folder / f"failure-step-{error.evidence['step'] + 1:06d}.json"
    write_text(file, json.dumps({**error.evidence, "lr": lr}, indent=1, allow_nan=False))
    return (
        f"{error}; evidence is in {file}, the last save is {save or 'none'}: look at the samples "
        f"it names, "
        f"check their cache entries ({family}-encode --verify-cache), or lower optim.lr ({lr:g})"
    )


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
