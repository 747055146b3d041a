"""Measure how long a block takes the host, forward and backward, ours and diffusers', where kernels
compute nothing. No GPU is needed.

    uv run tools/bench/bench_host_time.py > benchmarks/host_time.md       # some minutes on one core

With few tokens a GPU computes faster than the host launches, and a step takes the host's time. Here
CPU tensors of two tokens go the way of those on a GPU, so that the calls of torch's operations take
the time, and not their arithmetic. Triton's kernels are compiled for an H100 and launched by
Triton's own launcher, which is linked with a CUDA driver that does nothing. Two operations have a
stand-in: products of bf16 with results in fp32, which a CPU lacks, are fp32 products, and
diffusers' norms convert to fp32 first, as autocast does on a GPU alone, and are one operation.

Both have a LoRA of diffusers' and our default layers of attention; diffusers' blocks run under
autocast to bf16, as its training scripts do. The time is the processor's, of one thread; ours and
diffusers' take turns, and the least of all repeats counts. On a GPU, the work of CUDA's driver and
of cuBLAS comes on top of it for both.
"""

import argparse
import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from triton.runtime import driver

import diffusers_models
from bench_step import Pair
from ditkit_core.models.precision import Precision
from ditkit_core.nn import bf16_parts, lora
from ditkit_core.nn.context import BlockSettings, as_on, block_settings, device_current
from ditkit_core.nn.kernels.launch import Launcher

BF16, RANK, CAPABILITY = torch.bfloat16, 4, 90
DRIVER = r"""
#include <stdint.h>
typedef int R; typedef void *P;
R cuInit(unsigned a) { return 0; }
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuDeviceGet(int *d, int i) { *d = i; return 0; }
R cuDeviceGetCount(int *n) { *n = 1; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = 232448; return 0; }
R cuDevicePrimaryCtxRetain(P *c, int d) { *c = (P)1; return 0; }
R cuCtxGetCurrent(P *c) { *c = (P)1; return 0; }
R cuCtxGetDevice(int *d) { *d = 0; return 0; }
R cuCtxSetCurrent(P c) { return 0; }
R cuCtxSetLimit(int a, uint64_t b) { return 0; }
R cuCtxGetLimit(uint64_t *b, int a) { *b = 0; return 0; }
R cuGetErrorString(R e, const char **s) { *s = "none"; return 0; }
R cuModuleLoadData(P *m, const void *x) { *m = (P)16; return 0; }
R cuModuleUnload(P m) { return 0; }
R cuModuleGetFunction(P *f, P m, const char *n) { *f = (P)32; return 0; }
R cuFuncGetAttribute(int *v, int a, P f) { *v = a ? 0 : 1024; return 0; }
R cuFuncSetAttribute(P f, int a, int v) { return 0; }
R cuFuncSetCacheConfig(P f, int c) { return 0; }
R cuPointerGetAttribute(void *o, int a, uint64_t p) { *(uint64_t *)o = p; return 0; }
R cuStreamIsCapturing(P s, int *o) { *o = 0; return 0; }
R cuLaunchKernelEx(const void *c, P f, void **p, void **e) { return 0; }
R cuOccupancyMaxActiveClusters(int *n, P f, P c) { *n = 1; return 0; }
R cuTensorMapEncodeTiled() { return 0; }
R cuTensorMapEncodeIm2col() { return 0; }
"""
"""What Triton's launcher calls of CUDA's driver. A launch is accepted and forgotten."""


class NoGPU(CudaDriver):  # type: ignore[misc]
    """Triton's driver of NVIDIA's GPUs, with its launcher, on the device -1, as torch calls a
    CPU's."""

    def __init__(self) -> None:
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_current_device: Callable[[], int] = lambda: -1
        self.get_current_stream: Callable[[int], int] = lambda device: 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Inside the block a CPU's tensors take the paths of a GPU's, and Triton launches kernels that
    do nothing."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        source, library = Path(folder, "driver.c"), Path(folder, "libcuda.so.1")
        source.write_text(DRIVER, encoding="utf-8")
        compiler = os.environ.get("CC", "gcc")
        subprocess.run(
            [
                compiler,
                "-shared",
                "-fPIC",
                "-O2",
                "-w",
                "-Wl,-soname,libcuda.so.1",
                "-o",
                library,
                source,
            ],
            check=True,
        )
        Path(folder, "libcuda.so").symlink_to(library)
        # looks for GPUs, and would take that library for a broken driver
        torch.ones((), requires_grad=True).backward()
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        stack.enter_context(
            patch.dict(os.environ, TRITON_LIBCUDA_PATH=folder, TRITON_CACHE_DIR=f"{folder}/cache")
        )
        stack.enter_context(patch.object(driver, "_active", NoGPU()))
        stack.enter_context(as_on("cuda"))
        for module in (bf16_parts, lora):
            stack.enter_context(patch.object(module, "wide_product", _wide_product))
        yield


_WIDE: dict[tuple[torch.Size, torch.Size], tuple[Tensor, Tensor]] = {}


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    try:
        return torch.mm(*_WIDE[a.shape, b.shape])
    except KeyError:
        _WIDE[a.shape, b.shape] = torch.zeros(a.shape), torch.zeros(b.shape)
        return _wide_product(a, b)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of ours and of diffusers, each as a closure from inputs that are there to
    results."""

    name: str
    ours: Callable[[], Sequence[Tensor]]
    theirs: Callable[[], Sequence[Tensor]]
    parameters: Sequence[nn.Parameter]
    """Of both."""


def wan() -> Pair:
    """Wan, 2 tokens and 2 rows of text."""
    from ditkit_wan.model.inputs import WanInputs
    from ditkit_wan.model.transformer import WanTransformer
    from ditkit_wan.presets import WanArch
    from ditkit_wan.spec import WAN

    arch = WanArch(dim=32, ffn_dim=32, heads=2, layers=1, text_dim=16, text_tokens=2)
    theirs, ours = diffusers_models.wan(arch), WanTransformer(arch, Precision(matmul=BF16))
    diffusers_models.share_weights(
        ours, theirs, WAN.architecture.names, WAN.precision.keep_fp32, BF16
    )
    diffusers_models.share_adapters(
        ours, theirs, WAN.architecture.names, ("q", "k", "v", "o"), WAN.adapters.targets, RANK
    )
    latents = torch.randn(1, 16, 1, 2, 4)
    text = torch.randn(1, 2, 16).to(BF16)
    timestep = torch.tensor([731.25])
    return Pair(
        ours=ours.train(),
        theirs=theirs.train(),
        predict=lambda engine: ours(WanInputs(list(latents), timestep, list(text)), engine),
        their_predict=lambda: theirs(latents.to(BF16), timestep, text, return_dict=False)[0],
        target=latents,
        shape="",
    )


def flux2() -> Pair:
    """FLUX.2, 2 tokens and 2 rows of text."""
    from diffusers import Flux2Transformer2DModel

    from ditkit_flux2.model.inputs import Flux2Inputs
    from ditkit_flux2.model.rope import token_positions
    from ditkit_flux2.model.transformer import Flux2Transformer
    from ditkit_flux2.presets import Flux2Arch
    from ditkit_flux2.spec import FLUX2

    axes = (4, 4, 4, 4)
    arch = Flux2Arch(
        dim=32, heads=2, double_layers=1, single_layers=1, text_dim=16, text_tokens=2,
        guidance=False, axes=axes, mlp_ratio=1.0
    )  # fmt: skip
    theirs = Flux2Transformer2DModel(
        num_layers=1, num_single_layers=1, num_attention_heads=2, attention_head_dim=16,
        joint_attention_dim=16,
        guidance_embeds=False, axes_dims_rope=axes, mlp_ratio=1.0,
    )  # fmt: skip
    ours = Flux2Transformer(arch, Precision(matmul=BF16))
    diffusers_models.share_weights(
        ours, theirs, FLUX2.architecture.names, FLUX2.precision.keep_fp32, BF16
    )
    diffusers_models.share_adapters(
        ours, theirs, FLUX2.architecture.names, ("attention",), FLUX2.adapters.targets, RANK
    )
    latents = torch.randn(1, 128, 1, 1, 2)
    text = torch.randn(1, 2, 16).to(BF16)
    sigma = torch.tensor([0.73125])
    places = token_positions(2, (1, 2), [], torch.device("cpu"))
    rows = latents.flatten(2).transpose(1, 2).to(BF16)
    return Pair(
        ours=ours.train(),
        theirs=theirs.train(),
        predict=lambda engine: ours(
            Flux2Inputs(list(latents), sigma, None, list(text), [[]]), engine
        ),
        their_predict=lambda: theirs(
            rows, text, sigma, places[2:], places[:2], None, return_dict=False
        )[0],
        target=latents,
        shape="",
    )


BLOCKS = {
    "WanBlock": ("WanTransformerBlock", ("tokens",)),
    "Flux2DoubleBlock": ("Flux2TransformerBlock", ("image", "text")),
    "Flux2SingleBlock": ("Flux2SingleTransformerBlock", ("tokens",)),
}
"""By our class of a block: diffusers' class, and the fields of the carry that it advances."""


def blocks_of(pair: Pair) -> Iterator[Block]:
    """The first block of each class, with the inputs that it has in a forward."""
    carries: dict[nn.Module, Any] = {}

    def noted(model: Any, inputs: Any) -> Any:
        carry = model.embed(inputs)
        for block in model.blocks():
            carries[block] = carry
            carry = block(carry)
        return model.head(carry)

    with torch.no_grad():
        pair.predict(noted)
    calls: dict[str, tuple[nn.Module, Any, Any]] = {}

    def note(module: nn.Module, positional: Any, named: Any) -> None:
        calls.setdefault(type(module).__name__, (module, positional, named))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True) for module in pair.theirs.modules()
    ]
    with torch.no_grad(), autocast():
        pair.their_predict()
    for hook in hooks:
        hook.remove()
    for block, carry in carries.items():
        if (name := type(block).__name__) in BLOCKS:
            mirror, fields = BLOCKS[name]
            theirs, positional, named = calls[mirror]
            with_norms_of_a_gpu(theirs)
            yield Block(
                name=name,
                ours=_our_call(block, carry, fields),
                theirs=_their_call(theirs, positional, named, len(fields)),
                parameters=[*block.parameters(), *theirs.parameters()],
            )


def _our_call(
    block: nn.Module, carry: Any, fields: Sequence[str]
) -> Callable[[], Sequence[Tensor]]:
    carry = carry._replace(
        **{name: getattr(carry, name).clone().requires_grad_() for name in fields}
    )
    settings = BlockSettings(kernels="triton")

    def call() -> Sequence[Tensor]:
        with block_settings(settings):
            after = block(carry)
        return [getattr(after, name) for name in fields]

    return call


def _their_call(
    block: nn.Module, positional: Any, named: Any, advanced: int
) -> Callable[[], Sequence[Tensor]]:
    positional, named = tree_map_only(Tensor, lambda x: x.clone(), (positional, named))
    streams = [
        x
        for x in (*positional, *(named.get(f"{name}hidden_states") for name in ("", "encoder_")))
        if x is not None
    ]
    for x in streams[:advanced]:
        x.requires_grad_()

    def call() -> Sequence[Tensor]:
        with autocast():
            after = block(*positional, **named)
        return after if isinstance(after, tuple) else (after,)

    return call


def autocast() -> torch.autocast:
    """As diffusers' training scripts have it."""
    return torch.autocast("cpu", BF16)


class NormOnGPU(nn.Module):
    """A norm as a GPU computes it under autocast: one operation, in fp32. A CPU's autocast leaves
    norms as they are, and composes RMS norms."""

    def __init__(self, norm: Any):
        super().__init__()
        self.eps, self.shape = norm.eps, norm.normalized_shape
        is_rms = isinstance(norm, nn.RMSNorm)
        self.weight, self.offset = (
            norm.weight,
            torch.zeros_like(norm.weight) if is_rms else norm.bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if row is None else row.float() for row in (self.weight, self.offset))
        return F.layer_norm(x.float(), self.shape, weight, bias, self.eps)


def with_norms_of_a_gpu(block: nn.Module) -> None:
    """Replace the norms of a block of diffusers that autocast changes."""
    for owner in list(block.modules()):
        for name, child in owner.named_children():
            if type(child) in (nn.LayerNorm, nn.RMSNorm):
                setattr(owner, name, NormOnGPU(child))


@dataclass(kw_only=True)
class HostTime:
    """The least time of forwards and of backwards, in seconds."""

    forward: float = float("inf")
    backward: float = float("inf")

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    def __str__(self) -> str:
        return f"{1e6 * self.forward:,.0f} + {1e6 * self.backward:,.0f}"

    def add(self, call: Callable[[], Sequence[Tensor]], parameters: Sequence[nn.Parameter]) -> None:
        """Measure once more."""
        for parameter in parameters:
            parameter.grad = None
        start = time.process_time()
        results = call()
        end = time.process_time()
        self.forward = min(self.forward, end - start)
        gradients = [torch.ones_like(x) for x in results]
        start = time.process_time()
        torch.autograd.backward(results, gradients)
        self.backward = min(self.backward, time.process_time() - start)


def by_triton(
    self: Launcher,
    grid: Any,
    tensors: Any,
    numbers: Any = (),
    constants: Any = (),
    num_warps: int = 4,
) -> None:
    """In place of `Launcher`: Triton launches everything."""
    names = self._parameters[len(tensors) + len(numbers) :]
    with device_current(tensors[0]):
        self.kernel[grid](
            *tensors, *numbers, **dict(zip(names, constants, strict=True)), num_warps=num_warps,
            enable_fp_fusion=self._fusion
        )  # fmt: skip


def measured(block: Block, repeats: int) -> tuple[HostTime, HostTime, HostTime]:
    """Ours, ours with launches by Triton alone, and diffusers'."""
    ours, plain, theirs = HostTime(), HostTime(), HostTime()
    for turn in range(repeats):
        for _ in range(8):
            ours.add(block.ours, block.parameters)
        for _ in range(8):
            theirs.add(block.theirs, block.parameters)
        if turn % 4 == 0:
            with patch.object(Launcher, "__call__", by_triton):
                for _ in range(8):
                    plain.add(block.ours, block.parameters)
    return ours, plain, theirs


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=100, help="turns of eight forwards and backwards"
    )
    repeats = parser.parse_args(arguments).repeats
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # its small products take longer than torch's own
    print(
        "# The host's time of a block\n\n"
        f"Printed by `tools/bench/bench_host_time.py` with torch {torch.__version__} and Triton "
        f"{triton.__version__}, which says how it is measured.\n\n"
        "Forward + backward of a block with a LoRA, in microseconds of one CPU core, where kernels "
        "compute nothing; on a GPU, the work of CUDA's driver\n"
        "and of cuBLAS is added to all columns. diffusers: under bf16 autocast, with peft. The "
        "third column has launches of our kernels by Triton alone.\n\n"
        "| block | ours | ours, launched by Triton | diffusers | ours / diffusers "
        "|\n|---|---|---|---|---|"
    )
    with without_gpu():
        for make in (wan, flux2):
            for block in blocks_of(make()):
                ours, plain, theirs = measured(block, repeats)
                print(
                    f"| {block.name} | {ours} | {plain} | {theirs} | {ours.both / theirs.both:.2f} "
                    f"|",
                    flush=True,
                )


if __name__ == "__main__":
    main()
