"""Wan 2.x for ditkit. Start reading at spec.py.

model/ has the transformer, encoders/ the frozen VAEs, text encoder and CLIP, conditioning/ the
encoders of a dataset's other columns, demo/ tiny models.

    from ditkit_wan import WAN
"""

from typing import TYPE_CHECKING

from ditkit_core.io.lazy import lazy_names

if TYPE_CHECKING:
    from ditkit_wan.spec import WAN

__version__ = "0.1.0"
__all__ = ["WAN"]
__getattr__, __dir__ = lazy_names(__name__, {"WAN": "spec"})
