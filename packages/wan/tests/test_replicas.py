"""Wan trained by several ranks as replicas."""

from pathlib import Path

import every_replicas_of_wan as every
import pytest

from ditkit_core.testing.conformance_replicas import ReplicaConformance


@pytest.mark.ranks
@pytest.mark.slow
class TestReplicas(ReplicaConformance):
    script = Path(__file__).parent / "support" / "replicas_of_wan.py"


@pytest.mark.exhaustive
class TestEveryReplicas(ReplicaConformance):
    """Every case on up to four ranks."""

    script = Path(every.__file__)
    worlds = every.WORLDS
    continued = every.CONTINUED
