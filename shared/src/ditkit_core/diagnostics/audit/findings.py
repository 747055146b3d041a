"""The findings of a precision audit, as plain values that can be written to JSON and read back."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of a computation against the same one in fp64."""

    velocity: float
    """Root mean square of the prediction's difference, divided by the prediction's root mean square."""
    loss: float
    """Relative difference of the mean squared error."""
    gradient: float
    """Norm of the difference of all trained parameters' gradients, divided by the norm of the gradients."""


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
    """Seconds of forward and backward, divided by the seconds with the run's own dtypes; below 1 is faster."""
    num_bytes: int
    """Peak memory of the fullest device, minus that with the run's own dtypes."""


@dataclass(frozen=True, kw_only=True)
class PlaceFindings:
    """One place of `Precision`."""

    place: str
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
    own: Case
    """Errors with the run's own dtypes."""
    all_lowered: Case
    places: tuple[PlaceFindings, ...]
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


def audit_json(findings: AuditFindings) -> dict[str, Any]:
    """The findings as plain values."""
    return {**asdict(findings), "not_measured": dict(findings.not_measured)}


def audit_from_json(values: Mapping[str, Any]) -> AuditFindings:
    """Read the findings back from the values of `audit_json`."""

    def case(errors: Mapping[str, Any]) -> Case:
        return Case(
            overall=Errors(**errors["overall"]), bins=tuple(Errors(**bin_errors) for bin_errors in errors["bins"])
        )

    def entry(entry_values: Mapping[str, Any]) -> PlaceFindings:
        cost = None if entry_values["cost"] is None else Cost(**entry_values["cost"])
        return PlaceFindings(
            **{
                **entry_values,
                "alone": case(entry_values["alone"]),
                "all_but": case(entry_values["all_but"]),
                "cost": cost,
            }
        )

    converted: dict[str, Any] = {name: tuple(values[name]) for name in ("edges", "samples", "notes")}
    converted |= {name: case(values[name]) for name in ("own", "all_lowered")}
    return AuditFindings(**{**values, **converted, "places": tuple(map(entry, values["places"]))})
