"""FLUX.2 trained by several ranks as replicas."""

from pathlib import Path

import every_replicas_of_flux2 as every
import pytest
import replicas_of_flux2 as few

from ditkit_core.testing.conformance_replicas import ReplicaConformance


@pytest.mark.ranks
@pytest.mark.slow
class TestReplicas(ReplicaConformance):
    script = Path(few.__file__)
    worlds = few.WORLDS
    continued = few.CONTINUED


@pytest.mark.exhaustive
class TestEveryReplicas(ReplicaConformance):
    """Every case on up to four ranks."""

    script = Path(every.__file__)
    worlds = every.WORLDS
    continued = every.CONTINUED
