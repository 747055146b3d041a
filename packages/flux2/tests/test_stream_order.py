"""Faults in the order of streams are found in FLUX.2."""

from dataclasses import replace

from flux2_items import Images

from ditkit_core.testing.stream_faults import StreamFaultChecks


class TestFlux2(Images, StreamFaultChecks):
    arch = replace(Images.arch, double_layers=3, single_layers=3)
