"""A plan put together from a few blocks against the whole step run on fake tensors, and against
real tensors."""

from dataclasses import replace

import pytest
import torch
from toy_jobs import ARCH, toy_job

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.execution import Execution
from ditkit_core.loading.model import Model
from ditkit_core.planner.memory import Budget, DevicePlan, Profile, StageCost
from ditkit_core.planner.memory_tracker import MemoryTracker, flops_in
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.workload import Workload
from ditkit_core.testing.plans import check_kept, check_plan, divided, planned
from ditkit_core.testing.toy import TOY
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import EMAConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import TrainState
from ditkit_core.training.train_step import StepContext, training_step


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("full", "lora"), ("attn_only", "full"))
        ),
        *(
            pytest.param(policy, method, marks=pytest.mark.exhaustive)
            for policy in POLICIES
            for method in ("lora", "full")
            if (policy, method) not in (("full", "lora"), ("attn_only", "full"))
        ),
    ],
)
def test_three_blocks_say_what_six_hold_on_any_number_of_devices(policy, method):
    of = toy_job(method, checkpointing=policy, ema=EMAConfig(decay=0.9))
    found = profile(of)
    for cuts in ((), (3,), (2, 4)):
        # One device: to the byte. On several, the loss's few tensors lie partly on the first and
        # partly on the last.
        check_plan(found, of, cuts, rel=0.01 if cuts else 0.0)


def test_gradients_have_the_bytes_of_their_weights_and_are_no_activations():
    """Of fp32 adapters of rank 4 on a layer of 128 to 384 features. What a backward leaves of a
    block is a gradient, so that it releases all that the forward kept."""
    found = profile(toy_job(adapter=AdapterConfig(rank=4, targets=("qkv",))), splits=False)
    assert {block.gradients for block in found.blocks} == {4 * 4 * (128 + 384)}
    assert all(block.released == block.kept > 0 for block in found.blocks[1:])


LARGE = {"size": (17, 128, 128)}
"""Of which a carry is more than `offload.SMALLEST`."""


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        ("attn_only, 0-1=none, 4-=full", {}),
        *(
            pytest.param(policy, size, marks=pytest.mark.exhaustive)
            for policy, size in [
                ("full+offload, 2-3=none", LARGE),
                ("full, 0-2=none", {}),
                ("full, 3-=none", {}),
                ("full, 2-4=attn_only(self)", {}),
                ("every_n(2)", {}),
                ("every_n(3)", {}),
                ("full+offload", LARGE),
                ("attn_only+offload", LARGE),
                ("none+offload", LARGE),
                ("full, 0-2=full+offload", LARGE),
                ("attn_only+offload, 2-3=full", LARGE),
                ("full, 1=full+offload, 3=full+offload", LARGE),
            ]
        ),
    ],
)
@pytest.mark.slow
def test_blocks_of_different_policies_are_put_together_from_steps_of_one(policy, size):
    of = toy_job(checkpointing=policy, **size)
    found = profile(of)
    check_plan(found, of, (), rel=0.0)
    check_plan(found, of, (3,), rel=0.005)


@pytest.mark.parametrize(
    "policy",
    [
        *(
            pytest.param(policy, marks=pytest.mark.slow)
            for policy in ("attn_only(self)", "full, 1-3=none")
        ),
        *(
            pytest.param(policy, marks=pytest.mark.exhaustive)
            for policy in ("none", "full", "attn_only")
        ),
    ],
)
def test_what_blocks_keep_is_what_real_tensors_leave_alive(policy):
    check_kept(toy_job(checkpointing=policy))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changed",
    [
        {"optim": OptimConfig(fused_backward=True), "clip_norm": 0.0},
        {"optim": OptimConfig(name="muon")},
        {"optim": OptimConfig(name="adafactor")},
        {"optim": OptimConfig(name="adamw8bit")},
        {"micro_batches": 2},
        {"kind": "cpu"},
    ],
    ids=["fused", "muon", "adafactor", "adamw8bit", "accumulation", "cpu"],
)
def test_so_they_do_with_other_optimizers_and_several_micro_batches(changed):
    of = toy_job("full", checkpointing="full", **changed)
    found = profile(of)
    for cuts in ((), (2,)):
        check_plan(found, of, cuts, rel=0.01)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_base_that_is_multiplied_in_8_bits_is_planned_with_what_its_products_allocate(kernels):
    """The same arithmetic but for a text of few tokens, most of a block's matmuls in 8 bits, and no
    more is kept for the backward."""
    stored = toy_job(checkpointing="full", quantize="int8", kernels=kernels)
    computed = stored.with_execution(compute="int8")
    profiles = [profile(each) for each in (stored, computed)]
    plain, found = (each.blocks[1] for each in profiles)
    arithmetic = plain.flops_forward, plain.flops_backward
    assert (found.flops_forward, found.flops_backward) == pytest.approx(arithmetic, rel=1e-3)
    in_8_bits = {
        stage: [
            flops_in(
                (kernel, count)
                for kernel, count in kernels
                if kernel.kind.startswith("matmul_int8")
            )
            for kernels in (stage.kernels_forward, stage.kernels_backward)
        ]
        for stage in (plain, found)
    }
    assert in_8_bits[plain] == [0, 0]
    assert 0.4 < in_8_bits[found][0] / found.flops_forward < 1
    assert 0 < in_8_bits[found][1] < found.flops_backward
    assert (found.kept, found.released) == (plain.kept, plain.released)
    check_plan(profiles[1], computed, (), rel=0.0)


def test_an_adapter_on_some_blocks_makes_kinds_of_its_own():
    of = toy_job(
        adapter=AdapterConfig(rank=4, targets=("layers.[2345].qkv",)), arch=replace(ARCH, depth=8)
    )
    found = profile(of)
    assert [block.adapters > 0 for block in found.blocks] == [
        False,
        False,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    assert found.blocks[0].flops_backward == 0 < found.blocks[7].flops_backward
    check_plan(found, of, (), rel=1e-3)


@pytest.mark.parametrize(
    "policy",
    [
        "attn_only",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in POLICIES
            if name != "attn_only"
        ),
    ],
)
def test_the_plan_of_a_cpu_is_what_real_tensors_hold(policy):
    of = toy_job(checkpointing=policy, kind="cpu")
    found = profile(of)
    (plan,) = planned(found, divided(len(found.blocks), ()))
    # the noise and the caption, which the host has before they are sent, are the host's where that
    # is the device
    assert plan.peak == pytest.approx(real_peak(of), rel=0.02)


def real_peak(of, micro_batches: int = 1) -> int:
    """Bytes in use at the peak of a step on the CPU, with real tensors."""
    model = make_model(TOY, ARCH, dtype=torch.bfloat16, adapter=of.adapter)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    trained = TrainState(model, parameters, of.optim, of.ema)
    item = {name: torch.randn(x.shape).to(x.dtype) for name, x in of.batch[0].items()}

    def step(number: int) -> None:
        training_step(
            Model(model, BlockEngine(policy=of.schedule), TOY, parameters),
            [Batch(ids=["a"], items=[item])] * micro_batches,
            trained.optimizer,
            StepContext(step=number, seed=0, flow=of.flow),
            lr=1e-4,
            clip_norm=1.0,
        )

    step(0)
    trained.optimizer.zero_grad()
    with MemoryTracker() as ledger:
        ledger.track(model, "weights")
        ledger.track(
            [state for part in trained.optimizer.parts for state in part.state.values()],
            "optimizer",
        )
        step(1)
    return ledger.peak[torch.device("cpu")]


@pytest.mark.slow
def test_more_micro_batches_of_an_adapter_need_more_sets_of_its_gradients():
    of = toy_job(checkpointing="full", kind="cpu", adapter=AdapterConfig(rank=64))
    found = profile(of)

    def plan_of(micro_batches: int) -> DevicePlan:
        return planned(
            found, divided(len(found.blocks), ()), Workload(micro_batches=micro_batches)
        )[0]

    one_set = sum(stage.gradients for stage in (found.embed, *found.blocks, found.head))
    real = {count: real_peak(of, count) for count in (1, 2, 4)}
    for more, less in ((2, 1), (4, 2)):
        assert plan_of(more).peak - plan_of(less).peak == pytest.approx(
            real[more] - real[less], rel=0.02
        )
    assert (
        plan_of(4).purposes["gradients"]
        == 2 * one_set
        == plan_of(2).purposes["gradients"] + one_set
    )
    assert plan_of(8).purposes["gradients"] == 3 * one_set


def test_streamed_weights_are_on_the_host_but_for_two_blocks():
    block = StageCost(weights=100, kept=10, released=10)
    found = Profile(
        embed=StageCost(weights=1),
        blocks=(block,) * 6,
        head=StageCost(weights=2),
        crossing=(0,) * 7,
        crossing_back=(0,) * 7,
    )
    for streamed, expected in (
        ((), 603),
        ((5,), 603),
        ((1, 3), 603),
        ((0, 2, 4), 503),
        ((0, 1, 2, 3, 4, 5), 203),
    ):
        (plan,) = planned(found, divided(6, (), streamed))
        assert plan.purposes["weights"] == expected, streamed


def test_pipelined_micro_batches_keep_all_at_once():
    block = StageCost(kept=10, released=10, forward_extra=15, backward_extra=5)
    found = Profile(
        embed=StageCost(),
        blocks=(block,) * 4,
        head=StageCost(),
        crossing=(8,) * 5,
        crossing_back=(3,) * 5,
    )

    def peaks(**settings) -> list[int]:
        work = Workload(micro_batches=4, execution=Execution(**settings))
        return [plan.peak for plan in planned(found, divided(4, (2,)), work)]

    # first device: 20 and the gradient 3 sent back, and 5; second: with the carry's 8
    assert peaks() == [28, 33]
    assert peaks(pipelined=True) == [28 + 3 * 20, 33 + 3 * 28]


def test_a_pipelined_backward_waits_for_the_others_and_not_for_itself():
    """The second backward, which adds to gradients and needs more, runs when the first one's
    activations are gone. On the host are those of all."""
    block = StageCost(
        kept=10,
        released=10,
        forward_extra=15,
        backward_extra=5,
        backward_extra_again=9,
        on_host=4,
    )
    found = Profile(
        embed=StageCost(),
        blocks=(block,) * 4,
        head=StageCost(),
        crossing=(0,) * 5,
        crossing_back=(0,) * 5,
    )

    def plan_of(**settings) -> DevicePlan:
        work = Workload(micro_batches=4, execution=Execution(**settings))
        return planned(found, divided(4, ()), work)[0]

    one_by_one, pipelined = plan_of(), plan_of(pipelined=True)
    assert (one_by_one.peak, one_by_one.host) == (40 + 9, 4 * 4)
    assert (pipelined.peak, pipelined.host) == (4 * 40 + 5, 4 * 4 * 4)


def test_a_device_that_is_too_small_says_what_it_lacks():
    plan = DevicePlan(
        budget=Budget(name="a", total=100, reserve=10),
        purposes={"weights": 60, "activations": 40},
        crossing=0,
    )
    assert (plan.peak, plan.fits, plan.missing) == (100, False, 10)
    assert replace(plan, purposes={"weights": 90}).fits


@pytest.mark.parametrize(
    ("method", "policies"),
    [
        ("lora", ("attn_only",)),
        pytest.param("lora", ("none", "full+offload"), marks=pytest.mark.exhaustive),
        pytest.param("full", ("none", "attn_only", "full+offload"), marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_a_profile_like_another_is_the_one_that_is_made_alone(method, policies):
    """Updates, and the backward of stages on devices of their own, depend neither on the policy nor
    on the format of the weights."""
    optimizer = OptimConfig(name="muon" if method == "full" else "adamw")
    of = toy_job(
        method, checkpointing="full", ema=EMAConfig(decay=0.9), micro_batches=2, optim=optimizer
    )
    first = profile(of)
    for policy in policies:
        quantize = "nf4" if (method, policy) == ("lora", "attn_only") else "none"
        other = of.with_execution(checkpointing=policy, quantize=quantize)
        assert profile(other, like=first) == profile(other), policy
    fused = replace(of, optim=OptimConfig(fused_backward=True), clip_norm=0.0).with_execution(
        checkpointing="none"
    )
    if method == "full":
        assert profile(fused, like=profile(fused.with_execution(checkpointing="full"))) == profile(
            fused
        )
