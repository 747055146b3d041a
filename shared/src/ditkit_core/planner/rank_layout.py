"""How many ranks a plan is for, and what they divide among themselves.

A run file does not say how many ranks there are, since torchrun starts them. So a plan takes
torchrun's own numbers: processes per machine (`--nproc`) and machines (`--nodes`). Without
`--nproc`, a plan with `ranks.shard` or `ranks.context` has a rank for each GPU of a machine. A plan
with none of these is of one process, and several GPUs divide its model. The time of exchanges is
estimated from published rates of links.
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
    """The ranks of a plan; None for a process alone. `num_gpus` counts a machine's GPUs, 1 without
    any; `devices` is `train.devices`, which ranks cannot have."""
    shard, context = ranks.shard, ranks.context
    if not launch.nproc and launch.nodes == 1 and shard == context == 1:
        if launch.link:
            raise UserError(
                f"--link {launch.link} is between ranks, and this plan is of one process; add "
                f"--nproc N, or leave it out"
            )
        return None
    if launch.nproc < 0 or launch.nodes < 1:
        raise UserError(f"--nproc {launch.nproc} and --nodes {launch.nodes} must be at least 1")
    if devices:
        raise UserError(
            f"train.devices = {list(devices)} divides the model over the GPUs of one process, and "
            "this plan has several; leave one of them out"
        )
    nproc = launch.nproc or num_gpus
    if num_gpus not in (1, nproc):
        raise UserError(
            f"--gpus names {num_gpus} GPUs of a machine, and --nproc starts {nproc} processes on "
            "it; name one GPU for all of them, or as many as processes"
        )
    layout = RankLayout(nproc=nproc, nodes=launch.nodes, shard=shard, context=context)
    if layout.size % (group := max(shard, context)):
        key = "shard" if shard == group else "context"
        raise UserError(
            f"ranks.{key} = {group} needs a multiple of {group} ranks, and this plan has "
            f"{layout.size}; set --nproc (processes on a machine) "
            f"and --nodes (machines), as in --nproc {group}"
        )
    return layout


LINK_SHARE = 0.8
"""Share of a link's published rate that exchanges between ranks are assumed to reach; not
measured."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A kind of link."""

    name: str
    bandwidth: float
    """Published bytes per second in one direction."""
    per_machine: bool
    """Whether the ranks of a machine share one; else each has its own."""
    source: str


_KNOWN = (
    Link(name="nvlink", bandwidth=300e9, per_machine=False,
    source="NVIDIA A100 datasheet: 600 GB/s in both directions"),
    Link(name="pcie", bandwidth=31.5e9, per_machine=False, source="PCIe 4 x16"),
    Link(
        name="ib400", bandwidth=50e9, per_machine=False,
        source="NVIDIA ConnectX-7 datasheet: 400 Gb/s, an adapter for each GPU",
    ),
    Link(name="10gbe", bandwidth=1.25e9, per_machine=True,
    source="IEEE 802.3ae, one for each machine"),
)  # fmt: skip
LINKS = {link.name: link for link in _KNOWN}


@dataclass(frozen=True, kw_only=True)
class Route:
    """The links of a run: within a machine, and between machines."""

    layout: RankLayout
    within: Link
    between: Link

    @property
    def name(self) -> str:
        """The link that decides: between machines if there are several."""
        return (self.between if self.layout.nodes > 1 else self.within).name

    def ring(self, members: int) -> float:
        """Bytes per second that a rank sends in an all-gather, reduce-scatter or broadcast of ranks
        that all begin at once, of which each machine has `members`.

        A group over several machines uses all their adapters, as NCCL's rings do; groups that each
        have a rank on every machine share them.
        """
        crosses = self.between.bandwidth * (1 if self.between.per_machine else self.layout.nproc)
        rate = crosses * members / self.layout.nproc
        return LINK_SHARE * (min(self.within.bandwidth, rate) if members > 1 else rate)

    def gathered(self, group: int) -> float:
        """As `ring`, for groups of so many consecutive ranks."""
        if group <= self.layout.nproc:
            return self.within.bandwidth * LINK_SHARE
        return self.ring(self.layout.nproc)

    def between_two(self, rank: int, other: int) -> float:
        """Bytes per second from one rank to another while no others exchange."""
        together = rank // self.layout.nproc == other // self.layout.nproc
        return (self.within if together else self.between).bandwidth * LINK_SHARE

    def __str__(self) -> str:
        """The rates with their sources, in one line."""
        links = (
            [self.within, self.between]
            if self.layout.nodes > 1 and self.layout.nproc > 1
            else [LINKS[self.name]]
        )
        return ", ".join(
            f"{link.name} {link.bandwidth * LINK_SHARE / 1e9:g} GB/s, which is {LINK_SHARE:.0%} of "
            f"{link.bandwidth / 1e9:g} ({link.source})"
            for link in links
        )


def parse_links(text: str, layout: RankLayout) -> tuple[Route, ...]:
    """The links that `--link` names: one for ranks of one machine, or between machines; two, for
    both; without any, two usual choices."""
    names = [name.strip() for name in text.lower().split(",")] if text else []
    if unknown := [name for name in names if name not in LINKS]:
        raise UserError(
            f"--link {unknown[0]!r} is none of {', '.join(LINKS)}; write --link ib400, or --link "
            f"pcie,10gbe for two"
        )
    if len(names) > 2:
        raise UserError(
            f"--link {text!r} names {len(names)} links; give one, or one within a machine and one "
            f"between machines"
        )
    several = layout.nodes > 1
    if not names:
        pairs = (
            [("nvlink", "ib400"), ("nvlink", "10gbe")]
            if several
            else [("nvlink", "ib400"), ("pcie", "ib400")]
        )
    elif len(names) == 2:
        pairs = [(names[0], names[1])]
    else:
        pairs = [("nvlink", names[0]) if several else (names[0], "ib400")]
    return tuple(
        Route(layout=layout, within=LINKS[within], between=LINKS[between])
        for within, between in pairs
    )
