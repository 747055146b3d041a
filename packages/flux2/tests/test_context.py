"""FLUX.2 on ranks that share the tokens of each sample."""

from pathlib import Path

import pytest

from ditkit_core.testing.conformance_context import ContextConformance


class ContextOfFlux2(ContextConformance):
    script = Path(__file__).parent / "support" / "context_of_flux2.py"
    outputs = 2e-6


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextOfFlux2):
    """Under some policies."""


@pytest.mark.exhaustive
class TestContextOfEveryPolicy(ContextOfFlux2):
    scope = "all"
