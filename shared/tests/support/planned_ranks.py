"""Plans of ranks next to what real ranks do: bytes alive at the peak of a step, and bytes that are
sent, over gloo.

Run as a script it starts every number of ranks once, and `planner/test_rank_traffic.py` compares
its table with `planned`.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.utils._pytree import tree_leaves, tree_map_only

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.distributed.context_parallel import ContextParallel
from ditkit_core.distributed.ranks import Ranks, RanksConfig
from ditkit_core.distributed.shards import Shards
from ditkit_core.encoding.loader import Batch
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.loading.model import Model
from ditkit_core.models.spec import ModelSpec
from ditkit_core.planner.memory import Budget, Partition, compose
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.planner.planned_step import StepJob
from ditkit_core.planner.profiler import profile
from ditkit_core.planner.rank_layout import RankLayout, parse_links
from ditkit_core.planner.rank_step import RankStep, profile_of_rank, work_of_rank
from ditkit_core.planner.workload import Workload
from ditkit_core.testing.plans import step_of
from ditkit_core.testing.replicas import forked
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model
from ditkit_core.training.optim.optimizer import NamedOptimizer
from ditkit_core.training.train_step import StepContext, training_step

_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class RankCase:
    """A step that ranks share."""

    ranks: int = 2
    shard: int = 1
    context: int = 1
    method: Literal["lora", "full"] = "lora"
    policy: str = "full"
    micro_batches: int = 2

    @property
    def layout(self) -> RankLayout:
        """The ranks."""
        return RankLayout(nproc=self.ranks, shard=self.shard, context=self.context)

    def job(self, spec: ModelSpec, arch: Any, size: tuple[int, int, int]) -> StepJob:
        """The step on a CPU."""
        step = step_of(spec, arch, size, AdapterConfig(method=self.method, rank=32))
        ranks = RanksConfig(context=self.context)
        job = replace(step, micro_batches=self.micro_batches, kind="cpu")
        return job.with_execution(checkpointing=self.policy, ranks=ranks)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank in a step."""

    peak: int
    sent: int
    told: int = 0
    """`sent_bytes` of the metrics."""


def planned(job: StepJob, case: RankCase) -> RankBytes:
    """What a plan says of the fullest rank."""
    layout, whole = case.layout, Workload(micro_batches=case.micro_batches)
    found = profile_of_rank(profile(job), layout, job.precision.reduction)
    division = Partition(devices=(0,) * len(found.blocks))
    work = work_of_rank(whole, layout, adapts=case.method == "lora")
    (device,) = compose(found, division, [Budget(name="", total=2**50, workspace=0)], work)
    step = RankStep(layout=layout, profile=found, division=division, work=whole)
    (route,) = parse_links("nvlink", layout)
    return RankBytes(device.peak, sum(step.plan([route]).sent.values()))


class _Counter(MemoryTracker):
    """Also counts what collectives send, as rings do, and follows storages that FSDP2 empties and
    fills."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return super().__torch_dispatch__(func, types, args, kwargs)
        name = str(func).removeprefix("c10d.").removesuffix(".default").strip("_")
        self._count_sent(name, args)
        if name in ("send", "recv"):  # one rank would wait for what the other one does after it
            return super().__torch_dispatch__(func, types, args, kwargs)
        # Copies are exchanged, and the answer is finished work: threads of gloo drop the tensors of
        # theirs when they get to it, and next to other work on the machine that was after the peak.
        copies = tree_map_only(Tensor, torch.clone, args)
        out = func(*copies, **(kwargs or {}))
        is_work = not isinstance(out, (list, tuple))
        dist.Work.unbox(out if is_work else out[-1]).wait()
        for x, copy in zip(tree_leaves(args), tree_leaves(copies), strict=True):
            if isinstance(x, Tensor):
                x.copy_(copy)
        finished = Future[Any]()
        finished.set_result(None)
        work = _create_work_from_future(finished).boxed()
        return work if is_work else (*out[:-1], work)

    def _count_sent(self, name: str, args: Any) -> None:
        if name == "allgather_base":
            self.sent[name] += args[0].nbytes - args[1].nbytes
        elif name == "reduce_scatter_base":
            self.sent[name] += args[1].nbytes - args[0].nbytes
        elif name == "alltoall_base":
            self.sent[name] += (
                args[1].nbytes - args[1].nbytes // dist.ProcessGroup.unbox(args[2]).size()
            )
        elif name == "send" or (name == "broadcast" and args[2] == dist.get_rank()):
            self.sent[name] += sum(each.nbytes for each in args[0])
        elif name == "allreduce":
            num = dist.ProcessGroup.unbox(args[1]).size()
            self.sent[name] += sum(each.nbytes for each in args[0]) * 2 * (num - 1) // num

    def _add(self, tensor: Tensor, purpose: str) -> None:
        super()._add(tensor, purpose)
        self.watch(tensor)


def measured(job: StepJob, case: RankCase, ranks: Ranks) -> RankBytes:
    """The second of two real steps of this rank."""
    precision = job.precision
    model: Any = make_model(job.spec, job.arch, dtype=precision.matmul, adapter=_adapter(job))
    item = {
        name: torch.randn(x.shape).to(x.dtype)
        if x.is_floating_point()
        else torch.zeros_like(x, device="cpu")
        for name, x in job.batch[0].items()
    }
    batches = [Batch(ids=[str(number)], items=[dict(item)]) for number in range(case.micro_batches)]
    streams = job.spec.architecture.token_streams(job.arch)
    context = ContextParallel(ranks, streams) if case.context > 1 and streams else None
    engine = BlockEngine(policy=job.schedule, context=context)
    trainable, shards = trainable_parameters(model), None
    with _Counter() as tracker:
        if case.shard > 1:
            shards = Shards(model, trainable, precision, ranks, _HOST)
            trainable = shards.local
        tracker.track([*model.parameters(), *model.buffers(), item], "weights")
        trained = Model(model, engine, job.spec, trainable, shards=shards)
        optimizer = NamedOptimizer(trainable, job.optim)
        for step in range(2):
            tracker.restart_peak()
            tracker.sent.clear()
            before = ranks.bytes_sent
            now = StepContext(step=step, seed=0, flow=job.flow, ranks=ranks)
            training_step(trained, batches, optimizer, now, lr=1e-4, clip_norm=1.0)
        tracker.poll()
        return RankBytes(tracker.peak[_HOST], sum(tracker.sent.values()), ranks.bytes_sent - before)


def _adapter(job: StepJob) -> AdapterConfig | None:
    return job.adapter if job.adapter.method == "lora" else None


def main(
    spec: ModelSpec, arch: Any, size: tuple[int, int, int], cases: Mapping[str, RankCase]
) -> None:
    """The work of a script: every case on its ranks, as a table in the folder that its command line
    names."""
    torch.set_num_threads(1)
    # Imports peft, which else each of the processes would do.
    make_model(spec, arch, adapter=AdapterConfig(rank=4))
    folder, found = Path(sys.argv[1]), dict[str, Any]()
    for num in sorted({case.ranks for case in cases.values()}):

        def work(ranks: Ranks, num: int = num) -> dict[str, Any]:
            chosen = {name: case for name, case in cases.items() if case.ranks == num}
            return {
                name: vars(
                    measured(
                        case.job(spec, arch, size),
                        case,
                        Ranks(ranks.rank, num, shard=case.shard).grouped(case.context),
                    )
                )
                for name, case in chosen.items()
            }

        for rank in forked(num, work, folder / f"world {num}"):
            for name, each in rank.items():
                best = found.setdefault(name, dict(each))
                found[name] = {key: max(value, each[key]) for key, value in best.items()}
    (folder / "ranks.json").write_text(json.dumps(found))


ARCH, SIZE = ToyArch(dim=256, depth=4, heads=4), (1, 16, 16)
CASES = {
    "two replicas": RankCase(),
    "three replicas of eight micro-batches": RankCase(ranks=3, micro_batches=8, policy="none"),
    "replicas of all weights": RankCase(method="full", micro_batches=4),
    "two shards of eight micro-batches": RankCase(shard=2, micro_batches=8, policy="none"),
    "two shards of all weights": RankCase(shard=2, method="full", micro_batches=4),
    "two shards, repeated": RankCase(ranks=4, shard=2, micro_batches=4),
    "two ranks that share samples": RankCase(context=2, policy="attn_only"),
    "two shards that share samples": RankCase(context=2, shard=2, micro_batches=1),
}

if __name__ == "__main__":
    main(TOY, ARCH, SIZE, CASES)
