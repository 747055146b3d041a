"""The plan of a whole model at full size, made from three blocks of a kind, against all of its blocks on fake tensors."""

from ditkit_core.testing.conformance_plans import FullSizePlanConformance
from ditkit_flux2.spec import FLUX2


class TestPlan(FullSizePlanConformance):
    spec = FLUX2
    preset = "dev"
    size = (1, 1024, 1024)
    cut = 18
