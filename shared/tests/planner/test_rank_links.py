"""Rates of links between ranks."""

import pytest

from ditkit_core.errors import UserError
from ditkit_core.planner.rank_layout import LINK_SHARE, LINKS, RankLayout, parse_links

NODE, CLUSTER = RankLayout(nproc=8), RankLayout(nproc=8, nodes=4)


@pytest.mark.parametrize(
    ("text", "layout", "names"),
    [
        ("", NODE, [("nvlink", None), ("pcie", None)]),
        ("", CLUSTER, [("nvlink", "ib400"), ("nvlink", "10gbe")]),
        ("pcie", NODE, [("pcie", None)]),
        ("IB400", CLUSTER, [("nvlink", "ib400")]),
        ("pcie, 10gbe", CLUSTER, [("pcie", "10gbe")]),
    ],
)
def test_links_are_read(text, layout, names):
    routes = parse_links(text, layout)
    assert [
        (route.within.name, route.between.name if layout.nodes > 1 else None) for route in routes
    ] == names
    assert [route.name for route in routes] == [between or within for within, between in names]


@pytest.mark.parametrize("text", ["ethernet", "nvlink,", "pcie,ib400,10gbe"])
def test_an_unknown_link_is_refused(text):
    with pytest.raises(UserError, match="--link"):
        parse_links(text, CLUSTER)


def test_a_ring_over_machines_uses_the_adapters_of_all_ranks():
    """Published: 50 GB/s for each rank of ib400; 1.25 GB/s for a machine of 10gbe."""
    (fast,), (slow,) = parse_links("pcie,ib400", CLUSTER), parse_links("10gbe", CLUSTER)
    assert fast.gathered(32) == LINKS["pcie"].bandwidth * LINK_SHARE, (
        "eight adapters are faster than PCIe"
    )
    assert slow.gathered(32) == pytest.approx(1.25e9 * LINK_SHARE)
    assert slow.gathered(8) == LINKS["nvlink"].bandwidth * LINK_SHARE, "the ranks of one machine"
    # One rank of each machine: all eight such groups are busy at once.
    assert fast.ring(1) == pytest.approx(50e9 * LINK_SHARE) and slow.ring(1) == pytest.approx(
        1.25e9 / 8 * LINK_SHARE
    )
    assert (
        fast.between_two(7, 8) == 50e9 * LINK_SHARE
        and fast.between_two(8, 15) == 31.5e9 * LINK_SHARE
    )
