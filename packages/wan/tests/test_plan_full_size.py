"""The plan of a whole model at full size, made from three blocks of a kind, against all of its blocks on fake tensors."""

from ditkit_core.testing.conformance_plans import FullSizePlanConformance
from ditkit_wan.spec import WAN


class TestPlan(FullSizePlanConformance):
    spec = WAN
    preset = "t2v-14b"
    size = (49, 480, 832)
    cut = 13
