"""FLUX.2 at full size, without memory, on a device that is not the host: what runs where, in which
dtype, and what is held.

Widths are the models' own; two blocks of each kind by default, because a step is affine in their
number, and all of them in the slow tests.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import inject, trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.ac_schedule import parse_policy
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.run_block import run_block
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import build_on_meta
from ditkit_core.testing.combinations import daily
from ditkit_core.testing.full_size import DEVICE, Arithmetic, as_on_a_gpu, materialise
from ditkit_core.testing.live_bytes import LiveBytes
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, accumulate_gradients
from ditkit_flux2.presets import PRESETS, Flux2Arch
from ditkit_flux2.spec import FLUX2

RANK = 32
FEW = {"double_layers": 1, "single_layers": 1}
WIDTHS = ["dev", "klein-base-9b", "klein-base-4b"]  # the distilled ones are as wide

# torch_remat looks at the addresses of tensors, of which fake ones have none.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer of FakeTensor:UserWarning"
)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    as_on_a_gpu(monkeypatch)


def item(arch: Flux2Arch, side: int, references: int = 0) -> dict[str, Tensor]:
    """An image `side` x `side` pixels, as the cache has it, with references of another shape."""
    made = {
        "latents": torch.empty(128, 1, side // 16, side // 16),
        "text": torch.empty(arch.text_tokens, arch.text_dim, dtype=torch.bfloat16),
    }
    return made | {f"reference.{index}": torch.empty(128, 1, 48, 64) for index in range(references)}


def adapted(arch: Flux2Arch) -> torch.nn.Module:
    model = build_on_meta(FLUX2, arch, Precision())
    inject(model, AdapterConfig(rank=RANK), FLUX2.adapters.targets)
    return model


def check_step(model: torch.nn.Module, policy: str, samples: list[Mapping[str, Tensor]]) -> None:
    """One step on fake tensors."""
    trained = trainable_parameters(model)
    optimizer = NamedOptimizer(trained, OptimConfig())
    batch = Batch(ids=[str(number) for number in range(len(samples))], items=samples)
    with Arithmetic() as arithmetic:
        accumulate_gradients(
            Model(model, BlockEngine(policy=policy), FLUX2),
            [batch],
            StepContext(step=0, seed=0, flow=FlowConfig()),
        )
        optimizer.step(1e-4)
    for name, parameter in trained.items():
        gradient = parameter.grad
        assert gradient is not None and gradient.shape == parameter.shape, name
        assert (gradient.device, gradient.dtype) == (DEVICE, torch.float32), name
    flops = arithmetic.flops
    assert {device for _, device in flops} == {DEVICE}
    assert arithmetic.waits == [], "the host waits for the device"
    # Adapters of rank 32, modulation and the head are all that runs in fp32.
    assert flops[torch.float32, DEVICE] < 0.03 * flops[torch.bfloat16, DEVICE]
    assert flops.keys() == {(torch.float32, DEVICE), (torch.bfloat16, DEVICE)}


@pytest.mark.parametrize(
    "policy",
    [
        "attn_only",
        *(
            pytest.param(policy, marks=pytest.mark.exhaustive)
            for policy in POLICIES
            if policy != "attn_only"
        ),
    ],
)
def test_a_step_of_dev_stays_on_its_device_in_its_dtypes(policy):
    model = adapted(replace(PRESETS["dev"], **FEW))
    arch = model.embed.arch
    with FakeTensorMode():
        materialise(model, FLUX2)
        # of which one is padded
        check_step(model, policy, [item(arch, 512), item(arch, 1024, references=2)])


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("preset", WIDTHS)
def test_a_step_of_all_blocks_does_too(preset):
    model = adapted(PRESETS[preset])
    arch = model.embed.arch
    with FakeTensorMode():
        materialise(model, FLUX2)
        for policy in POLICIES:
            for side, references in ((512, 0), (1024, 0), (1024, 2)):
                check_step(model, policy, [item(arch, side, references)])


def held(model: torch.nn.Module, sample: dict[str, Tensor], policy: str) -> int:
    """Bytes alive after the forward of all blocks that were not there before it."""
    moved = {name: tensor.to(DEVICE) for name, tensor in sample.items()}
    sigma = torch.full((1,), 0.5, device=DEVICE)
    carry = model.embed(FLUX2.training.make_inputs([moved["latents"]], sigma, [moved], 1.0))
    with LiveBytes(carry, *model.parameters()) as live:
        for index, block in enumerate(model.blocks()):
            carry = run_block(block, carry, policy=parse_policy(policy), name=f"block {index}")
        return live.total()


@pytest.mark.parametrize("preset", daily(WIDTHS, "klein-base-4b"))
def test_policies_hold_what_their_blocks_are_written_to_keep(preset):
    """Per token and block, in bytes by the width D of the model; what has fewer columns (rank,
    heads, norms' inverses) is the tolerance."""
    model = adapted(replace(PRESETS[preset], **FEW))
    arch = model.embed.arch
    with FakeTensorMode():
        sample = item(arch, 1024, references=1)
        materialise(model, FLUX2)
        found = {policy: held(model, sample, policy) for policy in POLICIES}
    unit = FLUX2.training.num_tokens(sample) * arch.dim
    double, single = arch.double_layers, arch.single_layers
    expected = {
        # The fp32 stream that each block hands on; what the join takes is gone, what it makes is
        # there.
        "full": 4 * (double + single),
        # And the bf16 output of attention; what the join takes is kept as the result of a last
        # step.
        "attn_only": 4 * (double + single) + 2 * (double + single) + 4,
        # Two streams of fp32, two normed inputs in bf16, q and k before and q, k, v after their
        # norm, attention, and of the MLP its six-fold input and three-fold hidden features.
        "none": (2 * 4 + 2 * 2 + 2 * 2 + 3 * 2 + 2 + (6 + 3) * 2) * double
        # One stream, one normed input, the nine-fold projection, q and k, attention, and it again
        # next to the hidden features.
        + (4 + 2 + 9 * 2 + 2 * 2 + 2 + (1 + 3) * 2) * single,
    }
    for policy, columns in expected.items():
        assert columns * unit <= found[policy] <= 1.02 * columns * unit, policy


@pytest.mark.parametrize("preset", WIDTHS)
def test_what_is_kept_in_fp32_is_a_small_part(preset):
    """The modulations, and little besides: two bytes more for each of at most a twentieth of the
    parameters."""
    model = build_on_meta(FLUX2, PRESETS[preset], Precision())
    wide = sum(p.numel() for name, p in model.named_parameters() if FLUX2.precision.keep_fp32(name))
    modulation = (6 + 6 + 3 + 2) * PRESETS[preset].dim ** 2
    assert modulation < wide < 1.2 * modulation
    assert wide < sum(p.numel() for p in model.parameters()) / 20
