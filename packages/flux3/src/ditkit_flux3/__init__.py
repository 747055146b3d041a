"""FLUX.3 for ditkit. Start reading at spec.py.

model.py has the transformer, state_dict.py its names in files and who reads them, presets.py the
sizes, demo/ a tiny checkpoint, images and edits.

    from ditkit_flux3 import FLUX3
"""

from typing import TYPE_CHECKING

from ditkit_core.io.lazy import lazy_names

if TYPE_CHECKING:
    from ditkit_flux3.spec import FLUX3

__version__ = "0.1.0"
__all__ = ["FLUX3"]
__getattr__, __dir__ = lazy_names(__name__, {"FLUX3": "spec"})
