"""Z-Image for ditkit. Start reading at spec.py.

model.py has the transformer, encoders.py the frozen VAE and text encoder,
demo.py a tiny model and generated images.

    from ditkit_zimage import ZIMAGE
"""

from typing import TYPE_CHECKING

from ditkit_core.io.lazy import lazy_names

if TYPE_CHECKING:
    from ditkit_zimage.spec import ZIMAGE

__version__ = "0.1.0"
__all__ = ["ZIMAGE"]
__getattr__, __dir__ = lazy_names(__name__, {"ZIMAGE": "spec"})
