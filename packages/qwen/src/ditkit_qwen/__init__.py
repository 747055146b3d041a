"""Qwen-Image 2.1 for ditkit. Start reading at spec.py.

model.py has the transformer, state_dict.py its names in files, encoders.py the VAE and the text encoder,
demo/ a tiny checkpoint and images.

    from ditkit_qwen import QWEN
"""

from typing import TYPE_CHECKING

from ditkit_core.io.lazy import lazy_names

if TYPE_CHECKING:
    from ditkit_qwen.spec import QWEN

__version__ = "0.1.0"
__all__ = ["QWEN"]
__getattr__, __dir__ = lazy_names(__name__, {"QWEN": "spec"})
