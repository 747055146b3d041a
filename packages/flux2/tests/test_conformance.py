"""FLUX.2 against the checks that every model passes."""

from flux2_items import Images

from ditkit_core.testing.conformance import Conformance, CoreChecks


class TestEditing(Images, Conformance):
    last_layers = ("txt_mlp.2", "img_mlp.2", "linear2")


class TestTextToImage(Images, CoreChecks):
    """Levers do not see whether there are references, and few checks see more than that."""

    one_in = 23
    grids = ([(2, 3)], [(2, 5)], [(3, 2)])
