"""Some blocks of Wan at full size, without memory, on a device that is not the host: which matmul
runs where and in what."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import inject, trainable_parameters
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import build_on_meta
from ditkit_core.testing.full_size import DEVICE, Arithmetic, as_on_a_gpu, materialise
from ditkit_core.training.config import FlowConfig
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_step import StepContext, accumulate_gradients
from ditkit_wan.spec import WAN

RANK = 32


# torch_remat looks for its own
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize(
    ("preset", "policy"),
    [
        ("ti2v-5b", "attn_only"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("t2v-14b", "none"), ("vace-14b", "full"))
        ),
        *(
            pytest.param(preset, policy, marks=pytest.mark.exhaustive)
            for preset, policy in [
                *(("t2v-14b", policy) for policy in POLICIES if policy != "none"),
                ("flf2v-14b-720p", "attn_only"),
                ("i2v-a14b", "full"),
            ]
        ),
    ],
)
def test_a_step_stays_on_its_device_in_its_dtypes(preset, policy, monkeypatch):
    as_on_a_gpu(monkeypatch)
    arch = WAN.architecture.presets[preset]
    model = build_on_meta(
        WAN, replace(arch, layers=1, vace_layers=arch.vace_layers[:1]), Precision()
    )
    inject(model, AdapterConfig(rank=RANK), WAN.adapters.targets)
    with FakeTensorMode():
        materialise(model, WAN)
        trained = trainable_parameters(model)
        item = WAN.training.empty_item(arch, (81, 480, 832), ())
        optimizer = NamedOptimizer(trained, OptimConfig())
        with Arithmetic() as arithmetic:
            accumulate_gradients(
                Model(model, BlockEngine(policy=policy), WAN),
                [Batch(ids=["a"], items=[item])],
                StepContext(step=0, seed=0, flow=FlowConfig()),
            )
            optimizer.step(1e-4)
    assert all(p.grad.device == DEVICE and p.grad.dtype == torch.float32 for p in trained.values())
    flops = arithmetic.flops
    assert {device for _, device in flops} == {DEVICE}
    assert arithmetic.waits == [], "the host waits for the device"
    # Adapters and the head are all that runs in fp32: 2 % of the arithmetic at rank 32 and a width
    # of 5120.
    assert flops[torch.float32, DEVICE] < 3.2 * RANK / arch.dim * flops[torch.bfloat16, DEVICE]
