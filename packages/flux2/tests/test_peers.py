"""Levers of other trainers, in diffusers' transformer: a mask, the base's own prediction, an assistant."""

from flux2_items import Images

from ditkit_core.testing.conformance_peers import PeerChecks
from ditkit_flux2.verify import DIFFUSERS


class TestPeers(Images, PeerChecks):
    diffusers = DIFFUSERS
