"""A part of tools/gpu/gpu_truth.py: the reports that this project began with, measured natively.

- Wan2.2 #354: blocks with autocast islands raise a CheckpointError under FSDP2's mixed precision,
  because torch before 2.13 does not cast the inputs of a block again where it recomputes it. One
  rank casts as many do, so one GPU shows it.
- DiffSynth-Studio #1436: what it costs a step to offload the tensors that blocks keep.
- FastVideo #1410: checkpointing `full` against `attn_only` for all weights of Wan 2.1 1.3B, with
  diffusers' model under FSDP2 as its script sets it up: weights in fp32, bf16 compute, AdamW. It
  names 720×1280, and its recipe prepares latents of 480×832. Our steps at both sizes are the part
  `wan1_3b`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import diffusers_models
import gpu_models
from device_clock import attempted
from ditkit_core.io.memory import release_memory
from gpu_cases import CLIP, LONG_CLIP, Case, described, modes

Rows = Iterator[dict[str, Any]]
OFFLOADED = Case(
    name="8 blocks of Wan 14B, 480x832x49", family="wan", preset="t2v-14b", size=CLIP, blocks=8,
    repeats=2,
    modes=modes("full", "full+offload", "attn_only", "attn_only+offload"),
)  # fmt: skip


def seeds(device: torch.device, tiny: bool) -> Rows:
    """All three."""
    yield {
        "name": "Wan2.2 #354",
        "value": f"autocast islands, FSDP2 on one rank, torch {torch.__version__}",
    }
    with one_rank(device):
        for is_explicit in (False, True):
            for casts_inputs in (True, False):
                for is_outside in (True, False):
                    yield _recomputed(
                        device,
                        is_explicit=is_explicit,
                        casts_inputs=casts_inputs,
                        is_outside=is_outside,
                    )
    yield {"name": "DiffSynth-Studio #1436", "value": "what offloading costs a step"}
    if not tiny:  # `wan14b` runs the same code
        yield from gpu_models.steps_of_cases([OFFLOADED], device, tiny)
    yield {
        "name": "FastVideo #1410",
        "value": "all weights of Wan 1.3B in fp32, diffusers' model under FSDP2",
    }
    with one_rank(device):
        for size in ((77, 480, 832), LONG_CLIP)[: 1 if tiny else 2]:
            for policy in ("full", "attn_only"):
                name = f"{size[1]}x{size[2]}x{size[0]}, {policy}"
                yield from attempted(name, partial(_fastvideo, name, policy, size, device, tiny))
                release_memory()


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without saying so
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Block(nn.Module):
    """A block as those of Wan: its modulation and residual stream are in fp32, in regions of
    autocast or by explicit casts."""

    def __init__(self, dim: int, *, is_explicit: bool):
        super().__init__()
        self.is_explicit = is_explicit
        self.q, self.o, self.up, self.down = (
            nn.Linear(dim, 3 * dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, 4 * dim),
            nn.Linear(4 * dim, dim),
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """Residual stream and modulation to the next residual stream."""
        with self._island(x):
            e = self._wide(self.modulation) + self._wide(e)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = e.chunk(6, 1)
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2)
            for t in self.q(self._narrow(self._norm(x, shift, scale))).chunk(3, -1)
        )
        y = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        with self._island(x):
            x = self._wide(x) + self._wide(y) * gate
        y = self.down(F.gelu(self.up(self._narrow(self._norm(x, mlp_shift, mlp_scale)))))
        with self._island(x):
            return self._wide(x) + self._wide(y) * mlp_gate

    def _island(self, x: Tensor) -> AbstractContextManager[Any]:
        if self.is_explicit:
            return nullcontext()
        # A CPU has no autocast to fp32.
        return (
            torch.autocast(x.device.type, torch.float32)
            if x.is_cuda
            else torch.autocast("cpu", enabled=False)
        )

    def _wide(self, tensor: Tensor) -> Tensor:
        return tensor.float() if self.is_explicit else tensor

    def _narrow(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.q.weight.dtype) if self.is_explicit else tensor

    def _norm(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(x.float(), x.shape[-1:]) * (1 + scale.float()) + shift.float()


class Blocks(nn.Module):
    """Three of them."""

    def __init__(self, dim: int, *, is_explicit: bool):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, is_explicit=is_explicit) for _ in range(3))

    def forward(self, x: Tensor, e: Tensor, *, recomputes: bool) -> Tensor:
        """The residual stream behind the last."""
        # as Wan's time embedding returns it, whatever the dtype of this module's inputs
        e = e.float()
        for block in self.blocks:
            x = checkpoint(block, x, e, use_reentrant=False) if recomputes else block(x, e)
        return x


def _recomputed(
    device: torch.device, *, is_explicit: bool, casts_inputs: bool, is_outside: bool
) -> dict[str, Any]:
    """Gradients under checkpointing against those without; an error instead where there is one."""
    words = [
        "explicit casts" if is_explicit else "autocast islands",
        f"cast_forward_inputs={casts_inputs}",
        "autocast outside" if is_outside else "no autocast outside",
    ]  # fmt: skip
    results = []
    for recomputes in (False, True):
        try:
            results.append(_gradients(device, is_explicit, casts_inputs, is_outside, recomputes))
        except RuntimeError as error:  # CheckpointError is one
            how = "recomputed" if recomputes else "not recomputed"
            message = f"{how}: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
            # Only blocks that cast explicitly, in a wrapper that casts nothing, promise to work
            # with every torch.
            return {
                "name": ", ".join(words),
                "value": message,
                **({"ok": False} if is_explicit and not casts_inputs else {}),
            }
    same = all(map(torch.equal, *results))
    promised = {"ok": same} if is_explicit and not casts_inputs else {}
    return {
        "name": ", ".join(words),
        "value": "recompute equals none" if same else "gradients differ without an error",
        **promised,
    }


def _gradients(
    device: torch.device, is_explicit: bool, casts_inputs: bool, is_outside: bool, recomputes: bool
) -> list[Tensor]:
    dim = 256 if device.type == "cuda" else 32
    torch.manual_seed(0)
    model = Blocks(dim, is_explicit=is_explicit).to(device)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=casts_inputs
    )
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    x, e = torch.randn(2, 64, dim, device=device), torch.randn(2, 6, dim, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=is_outside):
        loss = model(x, e, recomputes=recomputes).float().square().mean()
    loss.backward()
    return [p.grad.full_tensor().clone() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]


def _is_attention(operation: str) -> bool:
    """Operations whose results FastVideo's `attn_only` keeps: attention's forward, and
    collectives."""
    is_flash = "flash_attn" in operation and ("forward" in operation or "fwd" in operation)
    return "backward" not in operation and (
        is_flash or "_scaled_dot_product" in operation or "_c10d_functional" in operation
    )


def _selective() -> Any:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return (
            CheckpointPolicy.MUST_SAVE
            if _is_attention(str(operation))
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)


def _fastvideo(
    name: str, policy: str, size: tuple[int, int, int], device: torch.device, tiny: bool
) -> Rows:
    """Steps of diffusers' model whose blocks are wrapped as FastVideo wraps them."""
    case = Case(
        name=name,
        family="wan",
        preset="t2v-1.3b",
        size=(5, 64, 64) if tiny else size,
        modes=(),
        method="full",
        repeats=1 if tiny else 2,
    )
    _, arch, _, outline = described(case, tiny)
    with device:
        model = diffusers_models.wan(arch).train()
    for key, block in list(model.blocks.named_children()):
        selective = {"context_fn": _selective} if policy == "attn_only" else {}
        model.blocks.register_module(
            key, checkpoint_wrapper(block, preserve_rng_state=False, **selective)
        )
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    item = {
        key: tensor.to(device) for key, tensor in gpu_models.random_batch(outline).items[0].items()
    }
    latents = item["latents"].bfloat16()[None]
    text = item["text"][None]
    target = torch.randn_like(item["latents"])
    timestep = torch.tensor([731.0], device=device)

    def step() -> float:
        prediction = model(
            hidden_states=latents, timestep=timestep, encoder_hidden_states=text, return_dict=False
        )[0]
        loss = (prediction.float() - target).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    yield {"name": name, **gpu_models.measured(step, case.repeats, device)}
