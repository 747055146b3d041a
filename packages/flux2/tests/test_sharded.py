"""FLUX.2 trained by several ranks that divide its weights."""

from pathlib import Path

import pytest
from sharded_of_flux2 import CASES, WORLDS

from ditkit_core.testing.conformance_sharded import EverySharded, ShardedConformance


@pytest.mark.exhaustive
class TestSharded(ShardedConformance):
    script = Path(__file__).parent / "support" / "sharded_of_flux2.py"
    sharded = WORLDS
    cases = CASES


class TestEverySharded(EverySharded):
    script = TestSharded.script.with_name("every_sharded_of_flux2.py")
