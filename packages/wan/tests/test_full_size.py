"""Two blocks of Wan 14B at full size, without memory, on a device that is not the host: which matmul runs where and in what."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ditkit_core.activation_checkpoint import POLICIES, Engine
from ditkit_core.adapters import AdapterConfig, inject, is_adapter_name, trainable_parameters
from ditkit_core.data import Batch
from ditkit_core.flow_matching import FlowConfig
from ditkit_core.optim import NamedOptimizer, OptimConfig
from ditkit_core.precision import Precision
from ditkit_core.prepare import build_on_meta
from ditkit_core.step import accumulate_gradients
from ditkit_wan.spec import WAN

DEVICE = torch.device("cpu:1")  # under fake tensors another device than the host
RANK = 32


class Matmuls(TorchDispatchMode):
    """Counts FLOPs by dtype; and device, and reads of the device by the host."""

    def __init__(self):
        super().__init__()
        self.flops = Counter[tuple[torch.dtype, torch.device]]()
        self.transfers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.transfers += func is torch.ops.aten._local_scalar_dense.default
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            a, b = args[-2:]
            self.flops[a.dtype, a.device] += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


def materialise(model: nn.Module) -> None:
    """Fake parameters in place of those on `meta`; `Module.to` cannot move them."""
    for prefix, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{leaf}".replace(".base_layer.", ".")
                wide = is_adapter_name(name) or WAN.keep_fp32(name)
                dtype = torch.float32 if wide else torch.bfloat16
                fake = torch.empty(parameter.shape, dtype=dtype, device=DEVICE)
                module._parameters[leaf] = nn.Parameter(fake, requires_grad=parameter.requires_grad)


@pytest.mark.filterwarnings(
    "ignore:Accessing the data pointer of FakeTensor:UserWarning"
)  # torch_remat looks for its own
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_of_14b_stays_on_its_device_in_its_dtypes(policy):
    model = build_on_meta(WAN, replace(WAN.presets["t2v-14b"], layers=2), Precision())
    inject(model, AdapterConfig(rank=RANK), WAN.adapter_targets)
    with FakeTensorMode():
        materialise(model)
        trained = trainable_parameters(model)
        item = {"latents": torch.empty(16, 21, 60, 104), "text": torch.empty(300, 4096, dtype=torch.bfloat16)}
        optimizer = NamedOptimizer(trained, OptimConfig())
        with Matmuls() as matmuls:
            accumulate_gradients(
                model, Engine(policy=policy), WAN, [Batch(ids=["a"], items=[item])], step=0, seed=0, flow=FlowConfig()
            )
            optimizer.step(1e-4)
    assert all(p.grad.device == DEVICE and p.grad.dtype == torch.float32 for p in trained.values())
    assert {device for _, device in matmuls.flops} == {DEVICE}
    assert matmuls.transfers == 0, "a micro-batch waits for the device"
    # Adapters of rank 32 and the head are all that runs in fp32: under 2 % of the arithmetic.
    assert matmuls.flops[torch.float32, DEVICE] < 0.02 * matmuls.flops[torch.bfloat16, DEVICE]
