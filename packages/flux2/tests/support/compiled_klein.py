"""The FLUX.2 that takes no guidance, for checks of compiled blocks: its embedding alone is another, which levers do not see."""

from dataclasses import replace

from flux2_items import Images

from ditkit_core.testing.conformance import CoreChecks


class Klein(Images, CoreChecks):
    """Klein, with references."""

    arch = replace(Images.arch, guidance=False)
