"""wav2vec2, the speech encoder of S2V, from a folder as transformers stores it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.io.console import NullProgress
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.weights.frozen import FrozenModule, find_weights, fingerprint

RATE = 16_000
"""Samples per second that it was trained with."""
STATES_PER_SECOND = 50
"""Rows of hidden states per second, as the authors count them."""
FEWEST_SAMPLES = 400
"""Shorter sound makes no row."""
# Not used without training: the row in place of masked ones, and the layer that recognises letters.
_UNUSED = frozenset(
    {"wav2vec2.masked_spec_embed", "masked_spec_embed", "lm_head.weight", "lm_head.bias"}
)
# torch's old weight norm, and the one that transformers uses now
_NORMED = {
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
}
PUBLISHED = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "conv_bias": True,
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
}
"""wav2vec2-large-xlsr-53-english, which S2V was trained with."""


def _to_native(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return f"{module}.{_NORMED[leaf]}" if leaf in _NORMED else name


SPEECH_NAMES = StateDictNames.renaming(prefixes=("wav2vec2.",), to_native=_to_native)


class SpeechEncoder(FrozenModule):
    """Speech to all hidden states of wav2vec2, in fp32; an `Encoder` of the core."""

    items_at_once = 1

    def __init__(self, components: ModelPaths, device: torch.device, *, states: int, features: int):
        """Find the weights and read their headers; nothing is loaded.

        Args:
            components: Where the model's files are.
            device: Device of the weights.
            states: Number of hidden states that the transformer takes.
            features: Their width.

        Raises:
            UserError: If there are none, they are damaged, or belong to another model.
        """
        source, config = config_of(components)
        super().__init__(
            build,
            config,
            source,
            SPEECH_NAMES,
            device,
            torch.float32,
            key="model.audio_encoder",
            ignore=_UNUSED,
        )
        full = _with_defaults(config)
        if (full.num_hidden_layers + 1, full.hidden_size) != (states, features):
            raise UserError(
                f"{source.path} has {full.num_hidden_layers + 1} hidden states of "
                f"{full.hidden_size}, and the model takes {states} of "
                f"{features}; get wav2vec2-large-xlsr-53-english, which is in the repository of S2V"
            )

    @cached_property
    def identity(self) -> str:
        """Digest of the weights."""
        return fingerprint(self.source.path, "normalised, all hidden states, fp32")

    @torch.no_grad()
    def encode(
        self,
        items: Sequence[Float[Tensor, " samples"]],
        advance: Callable[[float], None] = NullProgress.advance,
    ) -> list[dict[str, Tensor]]:
        """Hidden states of one piece of speech.

        Args:
            items: One piece: `RATE` samples per second, at least `FEWEST_SAMPLES`.
            advance: Called with 1 when it is done.

        Returns:
            `states` [states, rows, features], fp32 on the CPU.
        """
        (item,) = items
        states = read(self.module, item, self.device).cpu()
        advance(1.0)
        return [{"states": states}]


def build(config: Mapping[str, Any]) -> Any:
    """The encoder of a configuration, on the default device."""
    from transformers import Wav2Vec2Model

    return Wav2Vec2Model(_with_defaults(config))


def _with_defaults(config: Mapping[str, Any]) -> Any:
    """A configuration with the library's defaults for fields that files leave out, and without the
    masks of training."""
    from transformers import Wav2Vec2Config

    masks = {"apply_spec_augment": False, "mask_time_prob": 0.0, "mask_feature_prob": 0.0}
    return Wav2Vec2Config.from_dict(dict(config) | masks)


def read(
    model: Any, sound: Float[Tensor, " samples"], device: torch.device
) -> Float[Tensor, "states rows features"]:
    """All hidden states, on the device of the encoder's weights. The sound is normalised, as the
    authors' processor does."""
    values = sound.to(device)
    normal = (values - values.mean()) / (values.var(correction=0) + 1e-7).sqrt()
    return torch.cat(model(normal[None], output_hidden_states=True).hidden_states)


def config_of(components: ModelPaths) -> tuple[SafetensorsSource, dict[str, Any]]:
    """The weights' files, their headers read, and their configuration.

    Raises:
        UserError: If there are none, or they are damaged.
    """
    return find_weights(components, "audio_encoder", _no_config)


def _no_config(source: SafetensorsSource) -> dict[str, Any]:
    raise UserError(
        f"{source.path} is a single file; set model.audio_encoder to a folder with its config.json"
    )
