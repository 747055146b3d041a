"""The CLIP vision encoder of the image-to-video models, from a diffusers folder or ComfyUI's
`clip_vision_h` file."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.weights.frozen import FrozenModule, find_weights, fingerprint
from ditkit_wan.encoders.safe_names import SAFE_NAMES

# transformers dropped the prefix from its own names in version 5; files have it or not
IMAGE_NAMES = StateDictNames.renaming(prefixes=("vision_model.",), to_native=lambda name: name)
_NOT_VISION = frozenset(
    {"visual_projection.weight", "vision_model.embeddings.position_ids", "logit_scale"}
)
PUBLISHED = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "num_hidden_layers": 32,
    "image_size": 224,
    "patch_size": 14,
}
"""CLIP ViT-H/14, the image encoder of all Wan models that have one."""
_HEAD_DIM = 80  # of ViT-H/14, the one encoder that Wan uses
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation for CLIP's pixels in [0, 1]."""


class ImageEncoder(FrozenModule):
    """An image to the tokens of CLIP's second to last layer; an `Encoder` of the core."""

    items_at_once = 1

    def __init__(self, components: ModelPaths, device: torch.device, dtype: torch.dtype):
        """Find the weights and read their headers; nothing is loaded.

        Raises:
            UserError: If there are none, or they are damaged or belong to another model.
        """
        source, config = config_of(components)
        super().__init__(
            build,
            config,
            source,
            IMAGE_NAMES,
            device,
            dtype,
            key="model.image_encoder",
            ignore=_NOT_VISION,
            finish=self._set_positions,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens per image: one per patch, and the class token."""
        config = _with_defaults(self.config)
        return int(config.image_size // config.patch_size) ** 2 + 1

    @property
    def dim(self) -> int:
        """Width of a token."""
        return int(_with_defaults(self.config).hidden_size)

    @cached_property
    def identity(self) -> str:
        """Digest of the weights, the dtype and the resizing."""
        return fingerprint(self.source.path, str(self.dtype), "bicubic, penultimate layer")

    def _set_positions(self, module: Any) -> None:
        for name, buffer in module.named_buffers():  # files do not store it: the positions in order
            assert name.endswith("position_ids"), name
            owner = module.get_submodule(name.rpartition(".")[0])
            owner.position_ids = torch.arange(buffer.shape[1], device=self.device)[None]

    @torch.no_grad()
    def encode(
        self,
        items: Sequence[Float[Tensor, "3 1 height width"]],
        advance: Callable[[float], None] = NullProgress.advance,
    ) -> list[dict[str, Tensor]]:
        """Tokens of one image.

        Args:
            items: One image: pixels in [-1, 1]; it is resized to the encoder's square without
                cropping, as in the official code.
            advance: Called with 1 when the image is done.

        Returns:
            `image` [tokens, dim], the class token first, in the encoder's dtype, on the CPU.
        """
        (item,) = items
        tokens = read(self.module, item, self.device, self.dtype).cpu()
        advance(1.0)
        return [{"image": tokens}]


def build(config: Mapping[str, Any]) -> Any:
    """The encoder of a configuration, on the default device."""
    from transformers import CLIPVisionModel

    return CLIPVisionModel(_with_defaults(config))


def _with_defaults(config: Mapping[str, Any]) -> Any:
    """A configuration with the library's defaults for fields that files leave out."""
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig.from_dict(dict(config))


def read(
    model: Any, pixels: Float[Tensor, "3 1 height width"], device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "tokens dim"]:
    """Tokens of one image, on the device of the encoder's weights."""
    size = model.config.image_size
    square = F.interpolate(
        pixels.transpose(0, 1), size=(size, size), mode="bicubic", align_corners=False
    )
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    normal = ((square * 0.5 + 0.5 - mean) / std).to(device, dtype)
    return model(normal, output_hidden_states=True).hidden_states[-2][0]


def config_of(components: ModelPaths) -> tuple[SafetensorsSource, dict[str, Any]]:
    """The weights' files, their headers read, and their configuration.

    Raises:
        UserError: If there are none, or they are damaged or belong to another model.
    """
    return find_weights(components, "image_encoder", _config_of_file, safe_names=SAFE_NAMES)


def _config_of_file(source: SafetensorsSource) -> dict[str, Any]:
    """The configuration of a single file, read from its shapes."""
    shapes = {
        name.removeprefix("vision_model."): stored.shape for name, stored in source.tensors.items()
    }
    try:
        dim, _, patch, _ = shapes["embeddings.patch_embedding.weight"]
        positions = shapes["embeddings.position_embedding.weight"][0]
        ffn_dim = shapes["encoder.layers.0.mlp.fc1.weight"][0]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{source.path} is not a CLIP vision encoder; get clip_vision_h.safetensors, or set "
            f"its folder"
        ) from error
    return {
        "hidden_size": dim,
        "intermediate_size": ffn_dim,
        "num_attention_heads": dim // _HEAD_DIM,
        "hidden_act": "gelu",
        "num_hidden_layers": sum(name.endswith(".mlp.fc1.weight") for name in shapes),
        "image_size": round((positions - 1) ** 0.5) * patch,
        "patch_size": patch,
    }
