"""What a precision audit found, as plain values that go to JSON and back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far a computation is from the same one in fp64, relative to that."""

    velocity: float
    """Root mean square of the prediction's difference, by that of the prediction."""
    loss: float
    """Of the mean squared error."""
    gradient: float
    """Norm of the difference of all trained parameters' gradients, by the norm of the gradients."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """The errors of one choice of dtypes."""

    overall: Errors
    """Over all noise levels: squares are added up before the ratio is made."""
    bins: tuple[Errors, ...]
    """For each range of noise levels."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a place in another dtype costs, everything else as the run has it."""

    dtype: str
    """What it was tried in."""
    time_ratio: float
    """Seconds of forward and backward, by those of the run as it is; below 1 is faster."""
    num_bytes: int
    """Highest memory of the fullest device, less that of the run as it is."""


@dataclass(frozen=True, kw_only=True)
class PlaceFindings:
    """One place of `Precision`."""

    place: str
    dtype: str
    """What the run has it in."""
    alone: Case
    """Lowered, with all others in fp64."""
    all_but: Case
    """In fp64, with all others lowered."""
    cost: Cost | None
    """None where one batch does not show it."""


@dataclass(frozen=True, kw_only=True)
class AuditFindings:
    """Everything that an audit found."""

    lowered: str
    """The dtype that places were lowered to."""
    edges: tuple[float, ...]
    """Bounds of the ranges of noise levels."""
    samples: tuple[str, ...]
    own: Case
    """The run as it is configured."""
    all_lowered: Case
    places: tuple[PlaceFindings, ...]
    """By the error of the gradient when lowered alone, the largest first."""
    seconds: float
    """Median of the run's own forward and backward."""
    peak_bytes: int
    """Highest memory of the fullest device in it, weights included."""
    not_measured: Mapping[str, str]
    """Places that do nothing in one batch, and why."""
    notes: tuple[str, ...] = ()
    """What was measured on, line by line."""

    @property
    def bin_names(self) -> list[str]:
        """`0.05-0.25`, …"""
        return [f"{low:g}-{high:g}" for low, high in zip(self.edges, self.edges[1:], strict=False)]


def audit_json(findings: AuditFindings) -> dict[str, Any]:
    """The findings as plain values."""
    return {**asdict(findings), "not_measured": dict(findings.not_measured)}


def audit_from_json(values: Mapping[str, Any]) -> AuditFindings:
    """AuditFindings that were written as JSON."""

    def case(errors: Mapping[str, Any]) -> Case:
        return Case(overall=Errors(**errors["overall"]), bins=tuple(Errors(**each) for each in errors["bins"]))

    def place(found: Mapping[str, Any]) -> PlaceFindings:
        cost = None if found["cost"] is None else Cost(**found["cost"])
        return PlaceFindings(
            **{**found, "alone": case(found["alone"]), "all_but": case(found["all_but"]), "cost": cost}
        )

    given: dict[str, Any] = {name: tuple(values[name]) for name in ("edges", "samples", "notes")}
    given |= {name: case(values[name]) for name in ("own", "all_lowered")}
    return AuditFindings(**{**values, **given, "places": tuple(map(place, values["places"]))})
