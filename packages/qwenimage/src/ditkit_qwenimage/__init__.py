"""Qwen-Image (20B) for ditkit. Start reading at spec.py.

model.py has the transformer, state_dict.py its names in files, encoders.py the VAE and the text encoder,
demo/ a tiny checkpoint and images.

    from ditkit_qwenimage import QWENIMAGE
"""

from typing import TYPE_CHECKING

from ditkit_core.io.lazy import lazy_names

if TYPE_CHECKING:
    from ditkit_qwenimage.spec import QWENIMAGE

__version__ = "0.1.0"
__all__ = ["QWENIMAGE"]
__getattr__, __dir__ = lazy_names(__name__, {"QWENIMAGE": "spec"})
