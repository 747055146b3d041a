"""`train.checkpointing = budget` next to one policy for all blocks: presets of all families,
planned on three GPUs."""

from dataclasses import replace

import pytest

from ditkit_core.engine.ac_policies import AttentionOnly, Full, Policy
from ditkit_core.planner.ac_budget import BudgetTask, choose
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.partition import profiles_of
from ditkit_core.testing.plans import divided
from ditkit_flux2.spec import FLUX2
from ditkit_wan.spec import WAN
from ditkit_zimage.spec import ZIMAGE
from workspace import ROOT

GPUS = parse_gpus("rtx4090,h100,h200")
ALIKE = (Policy(), AttentionOnly(), AttentionOnly(names=("self",)), Full())
CASES = {
    "wan": (WAN, "t2v-1.3b", (49, 480, 832), "triton"),
    "flux2": (FLUX2, "klein-base-4b", (1, 1024, 1024), "torch"),
    "zimage": (ZIMAGE, "base", (1, 1024, 1024), "triton"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_policy_for_all_blocks_is_faster_and_needs_less_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    from step_jobs import step_job

    spec, preset, size, kernels = CASES[name]
    job = step_job(spec, spec.architecture.presets[preset], size, kernels=kernels)
    work, profile_of = replace(job.work, cuda_graphs="auto"), profiles_of(job)
    count, compared = len(profile_of(Full()).blocks), 0
    for gpu in GPUS:
        for share in (0.1, 0.17, 0.27, 0.6):
            limit = replace(gpu.budget, total=int(share * gpu.budget.available), reserve=0)
            task = BudgetTask(
                profile_of=profile_of,
                division=divided(count, ()),
                budgets=(limit,),
                work=work,
                gpus=(gpu,),
            )
            fitting = [
                (policy,) * count for policy in ALIKE if task.plan((policy,) * count)[0].fits
            ]
            if not fitting:
                continue
            chosen = choose(task)
            needs = task.seconds(chosen.policies, work), chosen.plans[0].peak
            for alike in fitting:
                others = task.seconds(alike, work), task.plan(alike)[0].peak
                assert needs == others or needs[0] < others[0] or needs[1] < others[1], (
                    gpu.name,
                    share,
                    alike[0],
                )
            compared += len(fitting)
    assert compared > 10
