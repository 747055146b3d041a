"""What each of two ranks does for `test_ranks.py`: collectives inside attention and behind an MLP,
and gradients of whole parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ditkit_core.distributed.fsdp import reduce_whole, shard
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.nn.attention.attention import kept
from ditkit_core.nn.attention.backends import BACKENDS, Backend
from ditkit_core.testing.sharded_steps import Calls, apart, differences, refused, step_of
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import largest, make_model

ARCH = ToyArch(depth=2)
POLICIES = ("none", "full", "attn_only", "attn_only(self)")


class InPlace(torch.autograd.Function):
    """all-to-all as most implementations of sequence parallelism call it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return InPlace.forward(ctx, gradient.contiguous())


def functional(x: Tensor) -> Tensor:
    """all-to-all as an operation that returns what it makes."""
    parts = [1] * dist.get_world_size()
    return funcol.wait_tensor(funcol.all_to_all_single_autograd(x, parts, parts, dist.group.WORLD))


EXCHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "functional": functional,
    "in place": InPlace.apply,
}


def over_ranks(exchange: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention of all ranks' tokens, each rank computing some of the heads."""

    def to_heads(x: Tensor) -> Tensor:
        parts = torch.stack(x.chunk(dist.get_world_size(), dim=2))
        return torch.cat(exchange(parts).unbind(), dim=1)

    def to_tokens(x: Tensor) -> Tensor:
        parts = torch.stack(x.chunk(dist.get_world_size(), dim=1))
        return torch.cat(exchange(parts).unbind(), dim=2)

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        return to_tokens(
            BACKENDS["sdpa"].kernel(to_heads(q), to_heads(k), to_heads(v), None, dropout)
        )

    return kernel


def counted(model: Any, engine: BlockEngine) -> tuple[dict[str, Tensor], dict[str, int]]:
    """A step, and its collectives of each kind but FSDP2's."""
    rank = dist.get_rank()
    with Calls() as calls:
        found = step_of(TOY, model, toy_items(2)[rank : rank + 1], engine, first=rank, of=2)
    kinds = ("all_to_all_single", "alltoall_base", "all_reduce", "allreduce")
    return found, {kind: calls.collectives[kind] for kind in kinds if calls.collectives[kind]}


def under_policies(
    build: Callable[[], Any], backend: str, policies: Sequence[str] = POLICIES
) -> dict[str, Any]:
    """Bits and collectives under each policy, by its name."""
    table, model, plain = {}, build(), dict[str, Tensor]()
    for policy in policies:
        found, collectives = counted(model, BlockEngine(policy=policy, backend=backend))
        plain = plain or found
        table[policy] = {"differs": differences(found, plain), "collectives": collectives}
    return table


def attention_over_ranks() -> dict[str, Any]:
    """By way of calling the collective and whether the model is sharded: what `under_policies`
    says."""
    table = {}
    for name, exchange in EXCHANGES.items():
        BACKENDS[name] = Backend(
            kernel=over_ranks(exchange), takes_mask=False, takes_dropout=True, half_only=False
        )
        for sharded in (False, True):

            def build(sharded: bool = sharded) -> Any:
                model = make_model(TOY, ARCH)
                if sharded:
                    shard(model, Precision(matmul=torch.float32))
                return model

            table[f"{name}/{'sharded' if sharded else 'whole'}"] = under_policies(build, name)
    return table


def attention_over_ranks_is_attention() -> dict[str, float]:
    """Largest distance of result and gradients from attention of all tokens in one process, for
    each way to exchange."""
    rank, random = dist.get_rank(), torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 8, 2, 4, generator=random) for _ in range(4)]
    whole, weight = [x.clone().requires_grad_() for x in tensors[:3]], tensors[3]
    expected = BACKENDS["sdpa"].kernel(*whole, None, 0.0)
    (expected * weight).sum().backward()
    mine = slice(4 * rank, 4 * rank + 4)
    found = {}
    for name, exchange in EXCHANGES.items():
        own = [x[:, mine].clone().requires_grad_() for x in tensors[:3]]
        out = over_ranks(exchange)(*own, None, 0.0)
        (out * weight[:, mine]).sum().backward()
        pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
        found[name] = largest((a - b[:, mine]).abs().max().item() for a, b in pairs)
    return found


class SumOfRanks(torch.autograd.Function):
    """A sum over ranks whose gradient is one too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOfRanks.forward(ctx, gradient.contiguous())


class Summed(nn.Module):
    """A layer of which every rank computes a part."""

    def __init__(self, layer: nn.Module, marked: bool):
        super().__init__()
        self.layer, self.marked = layer, marked

    def forward(self, h: Tensor) -> Tensor:
        h = self.layer(h)
        return kept(SumOfRanks.apply, "sum of the layer", h) if self.marked else SumOfRanks.apply(h)


def collective_in_an_mlp() -> dict[str, Any]:
    """By whether it is marked as kept: what `under_policies` says."""

    def build(marked: bool) -> Any:
        model: Any = make_model(TOY, ARCH)
        for block in model.blocks():
            # The last layer needs its input for its backward, so that no recompute stops before.
            block.mlp[1] = Summed(block.mlp[1], marked)
        return model

    policies = (*POLICIES, "full+offload", "attn_only+offload")
    return {
        name: under_policies(lambda: build(name == "marked"), "sdpa", policies)  # noqa: B023
        for name in ("marked", "unmarked")
    }


class Tabled(nn.Module):
    """An MLP whose result is scaled by a table that is stored in fp32 whatever the MLP is."""

    def __init__(self, mlp: nn.Module, dim: int):
        super().__init__()
        self.mlp, self.table = mlp, nn.Parameter(torch.linspace(-0.3, 0.5, dim))

    def forward(self, h: Tensor) -> Tensor:
        return (self.mlp(h).float() * (1 + self.table)).to(h.dtype)


def tables_of_another_dtype() -> dict[str, Any]:
    """Trained parameters of two dtypes in a block."""

    def build() -> Any:
        model: Any = make_model(TOY, ARCH, dtype=torch.bfloat16)
        for block in model.blocks():
            block.mlp = Tabled(block.mlp, ARCH.dim)
        return model

    joined = step_of(TOY, build(), toy_items(2), BlockEngine(), of=2)
    model = build()
    shard(model, Precision())
    found, collectives = counted(model, BlockEngine(policy="attn_only"))
    again = under_policies(lambda: model, "sdpa")
    return {
        "apart": apart(found, joined), "collectives": collectives, "again": again,
        "unreduced": refused(model),
        "whole": [n for n, p in model.named_parameters() if not isinstance(p, dist.tensor.DTensor)],
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    }  # fmt: skip


def gradients_of_whole_parameters() -> dict[str, Any]:
    """Added up over two backwards, with one that fails between them; and the model's gradient for
    the mean over ranks."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    model, x = nn.Linear(3, 2), torch.arange(12.0).view(2, 2, 3)
    nn.init.ones_(model.weight)
    reduce_whole(list(model.parameters()), mesh, torch.float32)
    model(x[rank]).square().mean().backward()
    handle = model.bias.register_hook(_fail)
    try:
        model(x[rank]).sum().backward()
    except ArithmeticError:
        failed = True
    handle.remove()
    model.zero_grad()
    for _ in range(2):
        model(x[rank]).square().mean().backward()
    alone = nn.Linear(3, 2)
    alone.load_state_dict(model.state_dict())
    for sample in x:
        alone(sample).square().mean().backward()
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), alone.parameters(), strict=True)]
    return {"failed": failed, "apart": max(((a - b).norm() / b.norm()).item() for a, b in pairs)}


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError("of this rank and the other")


def refusals() -> dict[str, str]:
    """What is said of models that cannot be sharded, or were not as a whole."""
    said = {}
    without_root: Any = make_model(TOY, ARCH)
    for block in without_root.blocks():
        fully_shard(block)
    said["without a root"] = refused(without_root)
    said["frozen outside"] = refused(without_root.requires_grad_(False))
    twice, split = make_model(TOY, ARCH), make_model(TOY, ARCH)
    shard(twice, Precision(matmul=torch.float32))
    split.head.to("meta")
    for name, model in (("twice", twice), ("on two devices", split)):
        try:
            shard(model, Precision(matmul=torch.float32))
        except UserError as error:
            said[name] = str(error)
    twice.later = nn.Linear(2, 2)
    said["added later"] = refused(twice)
    return said
