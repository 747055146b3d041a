"""Faults in the order of streams are found in Wan."""

from dataclasses import replace

from wan_items import Clips

from ditkit_core.testing.stream_faults import StreamFaultChecks


class TestWan(Clips, StreamFaultChecks):
    arch = replace(Clips.arch, layers=6)
