"""How many ranks a plan is for, and what they divide among themselves.

A run file does not say how many ranks there are, since torchrun starts them. So a plan takes torchrun's own numbers: processes per machine
(`--nproc`) and machines (`--nodes`). Without `--nproc`, a plan with `ranks.shard` or `ranks.context` has a rank for each GPU of a machine.
A plan with none of these is of one process, and several GPUs divide its model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ditkit_core.distributed.ranks import RanksConfig
from ditkit_core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PlannedLaunch:
    """The flags of a plan for a run that torchrun would start."""

    nproc: int = 0
    """Processes on each machine; 0 for one per GPU."""
    nodes: int = 1
    """Machines."""
    link: str = ""
    """Links to plan for, as `parse_links` takes them."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The ranks of a run, and what they divide."""

    nproc: int
    """Ranks on each machine."""
    nodes: int = 1
    """Machines."""
    shard: int = 1
    """Ranks that divide weights, gradients and optimizer state."""
    context: int = 1
    """Ranks that share the tokens of each sample."""

    @property
    def size(self) -> int:
        """All ranks."""
        return self.nproc * self.nodes

    @property
    def data_ranks(self) -> int:
        """Number of parts that a step's micro-batches are divided into."""
        return self.size // self.context

    def micro_batches(self, of_step: int) -> int:
        """Micro-batches of the rank that has most in a step."""
        return -(-of_step // self.data_ranks)

    def __str__(self) -> str:
        """The layout in a few words."""
        machines = f"{self.nodes} machines of {self.nproc}" if self.nodes > 1 else "one machine"
        parts = [f"{self.size} ranks on {machines}"]
        groups = self.size // self.shard
        if self.shard > 1:
            several = f"every {self.shard} of them divide the model, repeated {groups} times"
            parts.append(several if groups > 1 else "which divide the model")
        elif self.context == 1:
            parts.append("each with the whole model")
        if self.context > 1:
            parts.append(f"every {self.context} of them share the tokens of a sample")
        return ", ".join(parts)


def layout_of(
    ranks: RanksConfig, num_gpus: int, launch: PlannedLaunch, *, devices: Sequence[str] = ()
) -> RankLayout | None:
    """The ranks of a plan; None for a process alone. `num_gpus` are those of a machine, 1 without any; `devices` is `train.devices`, which ranks cannot have."""
    shard, context = ranks.shard, ranks.context
    if not launch.nproc and launch.nodes == 1 and shard == context == 1:
        if launch.link:
            raise UserError(
                f"--link {launch.link} is between ranks, and this plan is of one process; add --nproc N, or leave it out"
            )
        return None
    if launch.nproc < 0 or launch.nodes < 1:
        raise UserError(f"--nproc {launch.nproc} and --nodes {launch.nodes} must be at least 1")
    if devices:
        raise UserError(
            f"train.devices = {list(devices)} divides the model over the GPUs of one process, and this plan has several; "
            "leave one of them out"
        )
    nproc = launch.nproc or num_gpus
    if num_gpus not in (1, nproc):
        raise UserError(
            f"--gpus names {num_gpus} GPUs of a machine, and --nproc starts {nproc} processes on it; name one GPU for all of them, or as "
            "many as processes"
        )
    layout = RankLayout(nproc=nproc, nodes=launch.nodes, shard=shard, context=context)
    if layout.size % (group := max(shard, context)):
        key = "shard" if shard == group else "context"
        raise UserError(
            f"ranks.{key} = {group} needs a multiple of {group} ranks, and this plan has {layout.size}; set --nproc (processes on a machine) "
            f"and --nodes (machines), as in --nproc {group}"
        )
    return layout
