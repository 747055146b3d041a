"""Levers of other trainers, in diffusers' transformer: a mask, the base's own prediction, an assistant."""

from wan_items import Clips

from ditkit_core.testing.conformance_peers import PeerChecks
from ditkit_wan.verify import DIFFUSERS


class TestPeers(Clips, PeerChecks):
    diffusers = DIFFUSERS

    def sizes(self, index, grid):
        """Captions as long as the model takes: its pipelines pad text, and its transformer in diffusers does not."""
        return super().sizes(index, grid) | {"text": (self.arch.text_tokens, 20)}
