"""Links between ranks, with the published rates that the time of exchanges is estimated from."""

from dataclasses import dataclass

from ditkit_core.errors import UserError
from ditkit_core.planner.ranks.layout import RankLayout

LINK_SHARE = 0.8
"""Share of a link's published rate that exchanges between ranks are assumed to reach; not measured."""


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
    Link(name="nvlink", bandwidth=300e9, per_machine=False, source="NVIDIA A100 datasheet: 600 GB/s in both directions"),
    Link(name="pcie", bandwidth=31.5e9, per_machine=False, source="PCIe 4 x16"),
    Link(
        name="ib400", bandwidth=50e9, per_machine=False,
        source="NVIDIA ConnectX-7 datasheet: 400 Gb/s, an adapter for each GPU",
    ),
    Link(name="10gbe", bandwidth=1.25e9, per_machine=True, source="IEEE 802.3ae, one for each machine"),
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
        """Bytes per second that a rank sends in an all-gather, reduce-scatter or broadcast of ranks that all begin at once, of which each machine has
        `members`.

        A group over several machines uses all their adapters, as NCCL's rings do; groups that each have a rank on every machine share them.
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
        links = [self.within, self.between] if self.layout.nodes > 1 and self.layout.nproc > 1 else [LINKS[self.name]]
        return ", ".join(
            f"{link.name} {link.bandwidth * LINK_SHARE / 1e9:g} GB/s, which is {LINK_SHARE:.0%} of {link.bandwidth / 1e9:g} ({link.source})"
            for link in links
        )


def parse_links(text: str, layout: RankLayout) -> tuple[Route, ...]:
    """The links that `--link` names: one for ranks of one machine, or between machines; two, for both; without any, two usual choices."""
    names = [name.strip() for name in text.lower().split(",")] if text else []
    if unknown := [name for name in names if name not in LINKS]:
        raise UserError(
            f"--link {unknown[0]!r} is none of {', '.join(LINKS)}; write --link ib400, or --link pcie,10gbe for two"
        )
    if len(names) > 2:
        raise UserError(
            f"--link {text!r} names {len(names)} links; give one, or one within a machine and one between machines"
        )
    several = layout.nodes > 1
    if not names:
        pairs = [("nvlink", "ib400"), ("nvlink", "10gbe")] if several else [("nvlink", "ib400"), ("pcie", "ib400")]
    elif len(names) == 2:
        pairs = [(names[0], names[1])]
    else:
        pairs = [("nvlink", names[0]) if several else (names[0], "ib400")]
    return tuple(Route(layout=layout, within=LINKS[within], between=LINKS[between]) for within, between in pairs)
