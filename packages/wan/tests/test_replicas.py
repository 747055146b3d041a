"""Wan trained by several ranks as replicas."""

from pathlib import Path

import pytest

from ditkit_core.testing.conformance_replicas import ReplicaConformance


@pytest.mark.slow
class TestReplicas(ReplicaConformance):
    script = Path(__file__).parent / "support" / "replicas_of_wan.py"
