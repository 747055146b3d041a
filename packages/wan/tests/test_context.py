"""Wan on ranks that share the tokens of each sample."""

from pathlib import Path

import pytest

from ditkit_core.testing.conformance_context import ContextConformance
from ditkit_wan.model.carry import token_streams
from ditkit_wan.presets import PRESETS


class ContextOfWan(ContextConformance):
    script = Path(__file__).parent / "support" / "context_of_wan.py"


@pytest.mark.ranks
@pytest.mark.slow
class TestContext(ContextOfWan):
    """Under some policies."""


@pytest.mark.exhaustive
class TestContextOfEveryPolicy(ContextOfWan):
    scope = "all"


def test_only_music_cannot_be_shared():
    assert {bool(arch.music) for arch in PRESETS.values()} == {True, False}
    assert all((token_streams(arch) is None) == bool(arch.music) for arch in PRESETS.values())
