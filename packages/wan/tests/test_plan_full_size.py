"""The plan of a whole model at full size, made from three blocks of a kind, against all of its blocks on fake tensors."""

import pytest
import torch

from ditkit_core.adapters import AdapterConfig
from ditkit_core.ema import EMAConfig
from ditkit_core.flow_matching import FlowConfig
from ditkit_core.optim import OptimConfig
from ditkit_core.plan import Budget, Division, compose
from ditkit_core.precision import Precision
from ditkit_core.profile import Job, measure, profile
from ditkit_core.thinned import thinned
from ditkit_wan.spec import WAN


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("policy", "cuts"), [("none", ()), ("full", (13,)), ("attn_only", ())])
def test_the_plan_is_what_all_blocks_hold(policy, cuts):
    arch = WAN.presets["t2v-14b"]
    with torch.device("meta"):
        item = WAN.outline(arch, (49, 480, 832), [])
    job = Job(
        spec=WAN, arch=arch, adapter=AdapterConfig(rank=32), precision=Precision(), batch=[item], policy=policy,
        optim=OptimConfig(), ema=EMAConfig(), flow=FlowConfig(),
    )  # fmt: skip
    found = profile(job)
    devices = tuple(int(bool(cuts) and index >= cuts[0]) for index in range(len(found.blocks)))
    budgets = [Budget(name=str(index), total=10**12, workspace=0) for index in range(len(cuts) + 1)]
    plans = compose(found, Division(devices=devices), budgets)
    model = thinned(WAN, arch, job.precision, job.adapter, of_each=None)
    measured = measure(job, model, [0, *devices, len(cuts)])
    for device, plan in enumerate(plans):
        assert plan.peak == pytest.approx(measured.peaks[device], rel=1e-3), device
