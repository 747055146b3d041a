"""The findings of a precision audit, as plain values that can be written to JSON and read back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of a computation against the same one in fp64."""

    velocity: float
    """Root mean square of the prediction's difference, divided by the prediction's root mean
    square."""
    loss: float
    """Relative difference of the mean squared error."""
    gradient: float
    """Norm of the difference of all trained parameters' gradients, divided by the norm of the
    gradients."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The errors of one choice of dtypes."""

    overall: Errors
    """Errors over all noise levels; squares are summed before the division."""
    bins: tuple[Errors, ...]
    """Errors in each range of noise levels."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one place in another dtype, with all other places as in the run."""

    dtype: str
    """The dtype that was tried."""
    time_ratio: float
    """Seconds of forward and backward, divided by the seconds with the run's own dtypes; below 1 is
    faster."""
    num_bytes: int
    """Peak memory of the fullest device, minus that with the run's own dtypes."""


@dataclass(frozen=True, kw_only=True)
class OpGroupFindings:
    """One place of `Precision`, which is the dtype of a group of operations."""

    op_group: str
    dtype: str
    """The run's dtype of this place."""
    alone: Case
    """Errors with this place lowered and all others in fp64."""
    all_but: Case
    """Errors with this place in fp64 and all others lowered."""
    cost: Cost | None
    """None if one batch does not show the cost."""


@dataclass(frozen=True, kw_only=True)
class AuditFindings:
    """All findings of an audit."""

    lowered: str
    """The dtype that places were lowered to."""
    edges: tuple[float, ...]
    """Bounds of the ranges of noise levels."""
    samples: tuple[str, ...]
    as_run: Case
    """Errors with the run's own dtypes."""
    all_lowered: Case
    op_groups: tuple[OpGroupFindings, ...]
    """Sorted by the gradient's error when lowered alone, the largest first."""
    seconds: float
    """Median time of forward and backward with the run's own dtypes."""
    peak_bytes: int
    """Peak memory of the fullest device with the run's own dtypes, weights included."""
    not_measured: Mapping[str, str]
    """Places without an effect in one batch, with the reason."""
    notes: tuple[str, ...] = ()
    """Lines about the weights and samples that were used."""

    @property
    def bin_names(self) -> list[str]:
        """Names of the ranges of noise levels: `0.05-0.25`, …"""
        return [f"{low:g}-{high:g}" for low, high in zip(self.edges, self.edges[1:], strict=False)]


_JSON_NAMES = {"op_group": "place", "op_groups": "places", "as_run": "own"}


def audit_json(findings: AuditFindings) -> dict[str, Any]:
    """The findings as plain values."""
    return asdict(
        findings,
        dict_factory=lambda pairs: {_JSON_NAMES.get(name, name): value for name, value in pairs},
    )


def audit_from_json(values: Mapping[str, Any]) -> AuditFindings:
    """Read the findings back from the values of `audit_json`."""

    def case(errors: Mapping[str, Any]) -> Case:
        return Case(
            overall=Errors(**errors["overall"]),
            bins=tuple(Errors(**entry) for entry in errors["bins"]),
        )

    def op_group(entry: Mapping[str, Any]) -> OpGroupFindings:
        cases = {name: case(entry[name]) for name in ("alone", "all_but")}
        cost = entry["cost"] and Cost(**entry["cost"])
        return OpGroupFindings(op_group=entry["place"], dtype=entry["dtype"], cost=cost, **cases)

    converted: dict[str, Any] = {
        name: values[name] for name in ("lowered", "seconds", "peak_bytes", "not_measured")
    }
    converted |= {name: tuple(values[name]) for name in ("edges", "samples", "notes")}
    converted |= {"as_run": case(values["own"]), "all_lowered": case(values["all_lowered"])}
    return AuditFindings(op_groups=tuple(map(op_group, values["places"])), **converted)
