"""Nodes that `comfyui_server.py` gives to ComfyUI's server: conditioning without a text encoder.

It is copied to the server's `custom_nodes`; this folder must be on the server's PYTHONPATH.
"""

from typing import Any

import comfy.model_detection
import folder_paths
from safetensors.torch import load_file

from comfyui import know_small_zimage

know_small_zimage(comfy.model_detection)


class LoadConditioning:
    """Conditioning of a file in ComfyUI's input folder: the tensor `text` [tokens, width]."""

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "read"
    CATEGORY = "ditkit"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """What the node asks for."""
        return {"required": {"file": ("STRING", {})}}

    def read(self, file: str) -> tuple[Any]:
        """The conditioning, with one entry."""
        return ([[load_file(folder_paths.get_annotated_filepath(file))["text"][None], {}]],)


NODE_CLASS_MAPPINGS = {"LoadConditioning": LoadConditioning}
