"""LTX-Video for ditkit. Start reading at spec.py.

model.py has the transformer, state_dict.py its names in files, encoders.py the VAE, the text encoder
and the positions in time, sampling.py samples that begin with an image, demo/ a tiny checkpoint and
clips.

    from ditkit_ltx import LTX
"""

from typing import TYPE_CHECKING

from ditkit_core.io.lazy import lazy_names

if TYPE_CHECKING:
    from ditkit_ltx.spec import LTX

__version__ = "0.1.0"
__all__ = ["LTX"]
__getattr__, __dir__ = lazy_names(__name__, {"LTX": "spec"})
