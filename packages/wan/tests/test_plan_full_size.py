"""The plan of a whole model at full size, made from three blocks of a kind, against all of its blocks on fake tensors."""

from dataclasses import replace

import pytest

from ditkit_core.adapters.inject import AdapterConfig
from ditkit_core.planner.profiler import profile
from ditkit_core.testing.plans import check_plan, step_of
from ditkit_wan.spec import WAN


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("policy", "cuts"), [("none", ()), ("full", (13,)), ("attn_only", ())])
def test_the_plan_is_what_all_blocks_hold(policy, cuts):
    step = step_of(WAN, WAN.architecture.presets["t2v-14b"], (49, 480, 832), AdapterConfig(rank=32))
    job = replace(step, policy=policy)
    check_plan(profile(job), job, cuts, rel=1e-3)
