"""The suites that need only a tiny model, in one class: inherit `EverySuite`, set `spec` and
`arch`, define `items`.

    class TestZed(EverySuite):
        spec = ZED
        arch = ZedArch(dim=64, …)

        def items(self, count, ragged=False):
            return [{"latents": …, "text": …} for _ in range(count)]

The class itself has the checks of the seam. Suites with other needs are classes inside it, such as
`TestZed::TestReplicas`, with the marks that families give them. Plans, shared tokens, kernels on
ranks and the demo are classes of a package's own. A family that sets more for one of them writes it
as a class of its own, as FLUX.2's test_conformance.py does.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from ditkit_core.adapters.diffusers_model import DiffusersModel
from ditkit_core.testing.conformance import Conformance
from ditkit_core.testing.conformance_audit import AuditChecks
from ditkit_core.testing.conformance_peers import PeerChecks
from ditkit_core.testing.conformance_ranks import FewRanks, RanksConformance
from ditkit_core.testing.conformance_replicas import EveryReplica, ReplicaConformance
from ditkit_core.testing.conformance_sharded import EverySharded
from ditkit_core.testing.stream_faults import StreamFaultChecks
from ditkit_core.testing.world import Items, ModelChecks

_RANKS = (pytest.mark.ranks, pytest.mark.slow)
_NIGHTLY = (pytest.mark.exhaustive,)


@dataclass(frozen=True)
class _Suite:
    """A suite as a class inside of `EverySuite`."""

    checks: type
    marks: tuple[pytest.MarkDecorator, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    """Class attributes of the suite."""


SUITES = {
    "TestStreamOrder": _Suite(StreamFaultChecks),
    "TestAudit": _Suite(AuditChecks),
    "TestReplicas": _Suite(ReplicaConformance, _RANKS),
    "TestEveryReplicas": _Suite(EveryReplica, _NIGHTLY),
    "TestFewRanks": _Suite(FewRanks, _RANKS),
    "TestRanks": _Suite(RanksConformance, _NIGHTLY),
    "TestEverySharded": _Suite(EverySharded, _NIGHTLY),
}
"""By the name of its class inside of `EverySuite`."""


class EverySuite(Conformance):
    """The suites that need only a tiny model: inherit, set `spec` and `arch`, define `items`."""

    deeper: ClassVar[Any] = None
    """An architecture with six blocks, for faults in the order of streams; None leaves them out."""
    diffusers: ClassVar[DiffusersModel | None] = None
    """diffusers' transformer, if there is one: levers of other trainers are then compared with
    it."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Add a class for each suite."""
        super().__init_subclass__(**options)
        for name, suite in SUITES.items():
            _add(cls, name, suite)
        if cls.diffusers is not None:
            _add(cls, "TestPeers", _Suite(PeerChecks, values={"diffusers": cls.diffusers}))


def _add(family: type[EverySuite], name: str, suite: _Suite) -> None:
    if name == "TestStreamOrder" and family.deeper is None:
        return

    def items(self: ModelChecks, count: int, ragged: bool = False) -> Items:
        return family().items(count, ragged)

    values = {
        "spec": family.spec, "arch": family.deeper if name == "TestStreamOrder" else family.arch,
        "items": items,
        "last_layers": family.last_layers, "__module__": family.__module__,
        "__qualname__": f"{family.__qualname__}.{name}",
        "__doc__": suite.checks.__doc__,
    }  # fmt: skip
    checks: type = type(name, (suite.checks,), values | suite.values)
    for mark in suite.marks:
        checks = mark(checks)
    setattr(family, name, checks)
