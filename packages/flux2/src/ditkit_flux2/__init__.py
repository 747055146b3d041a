"""FLUX.2 for ditkit. Start reading at spec.py.

model/ has the transformer, encoders/ the frozen VAE and text encoders, conditioning/ the sizes of
reference images, demo/ a tiny model.

    from ditkit_flux2 import FLUX2
"""

from typing import TYPE_CHECKING

from ditkit_core.io.lazy import lazy_names

if TYPE_CHECKING:
    from ditkit_flux2.spec import FLUX2

__version__ = "0.1.0"
__all__ = ["FLUX2"]
__getattr__, __dir__ = lazy_names(__name__, {"FLUX2": "spec"})
