"""Language models that read captions, as plain values: their class in transformers, chat template,
the layers that are read, and what they see with."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ditkit_core.errors import UserError

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """The part of a model in transformers that sees, and the words in a prompt that stand for a
    picture.

    Its representation is part of the identity of caches, as a `TextFamily`'s.
    """

    name: str
    """Start of the tower's configuration in transformers: `Qwen3VLVision` for
    Qwen3VLVisionConfig."""
    module: str = field(repr=False)
    """`module:class` of the tower in transformers."""
    published: Mapping[int, Mapping[str, Any]] = field(repr=False)
    """Configurations of published towers by the width of their rows, which is the text's: for plans
    without files and for single files."""
    picture: str = "<|vision_start|><|image_pad|><|vision_end|>"
    """What a picture is in a prompt, in front of its caption; `{number}` is 1, 2, … there."""
    between: str = ""
    """What is between two pictures."""
    slot: str = "<|image_pad|>"
    """The token in `picture` that is repeated for each row of it; removed from captions."""
    divides_text: bool = False
    """Whether pictures divide a prompt's features: `text.0` has the rows in front of the first one,
    `text.1` those in front of the second, …, and `text` those behind the last one. Slots have no
    rows then: the transformer has its latents there."""
    mean: tuple[float, float, float] = _CLIP_MEAN
    deviation: tuple[float, float, float] = _CLIP_DEVIATION
    """With `mean`: how pixels in [0, 1] are normalised, by channel."""
    pixels: tuple[int, int] = (56 * 56, 28 * 28 * 16384)
    """Fewest and most pixels of a picture; others are resized."""
    usual_pixels: int = field(default=1024 * 1024, repr=False)
    """Pixels of a picture as plans count them."""

    def num_slots(self, height: int, width: int) -> int:
        """Rows of a picture of this size among the features of a published model."""
        config = next(iter(self.published.values()))
        return math.prod(
            self.grid(height, width, config["patch_size"] * config["spatial_merge_size"])
        )

    def grid(self, height: int, width: int, factor: int) -> tuple[int, int]:
        """Rows and columns of slots of a picture of this size, when each is `factor` pixels on a
        side."""
        fewest, most = self.pixels
        sides = round(height / factor), round(width / factor)
        if math.prod(sides) * factor**2 > most:
            shrunk = math.sqrt(height * width / most) * factor
            return max(1, math.floor(height / shrunk)), max(1, math.floor(width / shrunk))
        if math.prod(sides) * factor**2 < fewest:
            enlarged = math.sqrt(fewest / (height * width)) / factor
            return math.ceil(height * enlarged), math.ceil(width * enlarged)
        return sides


QWEN2_5_VL_TOWER = VisionTower(
    name="Qwen2_5_VLVision",
    module="transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel",
    published={
        3584: {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        }
    },
)  # fmt: skip
"""The tower of Qwen2.5-VL 7B. Source: Qwen/Qwen2.5-VL-7B-Instruct, config.json and
preprocessor_config.json."""

QWEN3_VL_TOWER = VisionTower(
    name="Qwen3VLVision",
    module="transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel",
    published={
        2560: {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
            "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2,
            "deepstack_visual_indexes": [5, 11, 17],
        },
        4096: {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
            "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
    pixels=(256 * 256, 4096 * 4096),
)  # fmt: skip
"""The tower of Qwen3-VL 4B and 8B. Source: Qwen/Qwen3-VL-4B-Instruct and
Qwen/Qwen3-VL-8B-Instruct, config.json and preprocessor_config.json."""


@dataclass(frozen=True, kw_only=True)
class TextFamily:
    """A family of language models in transformers, the chat template of its captions, and the
    layers whose hidden states are the features.

    Its representation is part of the identity of caches, so what changes no feature of a file stays
    out of it.
    """

    name: str
    layers: tuple[int, ...]
    """The numbers of layers after which hidden states are taken; counted from the end if negative,
    as in transformers' `hidden_states`: -2 is before the last layer. Only -1 is behind the last
    norm as well."""
    before: str
    after: str
    dropped: int = field(default=0, repr=False)
    """Number of tokens of `before` whose features are no part of the result: of a system prompt,
    which the transformer does not attend to."""
    dropped_turn: str = field(default="", repr=False)
    """The start of `before` that is dropped, where its number of tokens is the tokenizer's."""
    removed: str = ""
    """A token that is removed from captions, because it would stand for an image; empty for
    none."""
    special: tuple[str, ...]
    """Tokens of the template that must not be split into pieces."""
    padding: str
    pads_left: bool = False
    """Whether the padding is before the tokens."""
    kind: str = field(repr=False)
    """Start of the classes in transformers: `Qwen3` for Qwen3Config and Qwen3Model."""
    model_type: str = field(repr=False)
    unstated: Mapping[str, Any] = field(repr=False)
    """Configuration that the shapes in a single file do not give: `rope_theta`, `rms_norm_eps`."""
    published: Mapping[str, Mapping[str, Any]] = field(repr=False)
    """Configurations of published models, for plans without files: by name."""
    vision: VisionTower | None = field(default=None, repr=False)
    """What it sees references with; None for a model that reads captions alone, whether or not it
    could see."""
    norms_heads: bool = field(default=False, repr=False)
    """Whether its attention normalises the heads of queries and keys, which tells a single file of
    it from others."""
    last_norm: bool = field(default=False, repr=False)
    """Whether the last norm is run: set where layers are counted from the start, if the last of
    them was -1."""

    def render(self, caption: str) -> str:
        """The prompt of a caption: the caption in its template."""
        return (
            self.before
            + (caption.replace(self.removed, "") if self.removed else caption)
            + self.after
        )


@dataclass(frozen=True, kw_only=True)
class TextEncoding:
    """How a model family reads captions: with which language models, and what of them."""

    models: tuple[TextFamily, ...]
    """The language models; the files say which of them it is."""

    reader: str
    """Name of the model family in messages: `FLUX.2`."""

    remedy: str
    """Where to get the text encoder, for messages."""

    num_tokens: int = 512
    """Tokens of a caption, with its template and padding; longer captions are cut."""

    keeps_padding: bool = False
    """Whether features of padding belong to the result, because the transformer attends to them.
    Otherwise a caption has a row for each of its tokens."""

    keeps_end: bool = False
    """Whether a caption that is too long is cut in front of the end of its template; otherwise the
    end is cut with it."""

    window: int = 0
    """If not 0, a caption is padded to a multiple of this many tokens instead of `num_tokens`, which
    then only cuts it. Padding is at position 1, as transformers 4 had it where no one said."""

    planned_tokens: int = 0
    """Tokens of a caption as plans count them, where `num_tokens` is far above what captions have;
    0: `num_tokens`."""

    def padded(self, tokens: int) -> int:
        """Number of tokens of a caption with its padding."""
        if not self.window:
            return self.num_tokens
        return min(-(-tokens // self.window) * self.window, self.num_tokens)

    @property
    def usual_tokens(self) -> int:
        """Tokens of a caption as plans count them."""
        return self.planned_tokens or self.num_tokens

    def __post_init__(self) -> None:
        if not self.models:
            raise UserError(
                f"the TextEncoding of {self.reader} names no language model: `models` are causal "
                f"ones, such as QWEN3; T5 and its kin are a T5Encoding, and an encoder of the "
                f"package is a CaptionEncoding (docs/adding_a_model.md, 4. Encoders)"
            )
        if len({model.vision is None for model in self.models}) > 1:
            raise UserError(
                f"the TextEncoding of {self.reader} has models with a `vision` and models without; "
                f"an encoder sees references, or reads captions alone"
            )

    @property
    def sees(self) -> bool:
        """Whether it sees the references of a prompt."""
        return self.models[0].vision is not None


_QWEN3 = {
    "vocab_size": 151936, "num_hidden_layers": 36, "head_dim": 128, "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip

QWEN3 = TextFamily(
    name="Qwen3",
    layers=(-2,),
    before="<|im_start|>user\n",
    after="<|im_end|>\n<|im_start|>assistant\n",
    special=("<|im_start|>", "<|im_end|>"),
    padding="<|endoftext|>",
    kind="Qwen3",
    model_type="qwen3",
    unstated={"rms_norm_eps": 1e-6, "rope_theta": 1e6},
    published={
        "Qwen3 8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288},
        "Qwen3 4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728},
    },
    norms_heads=True,
)
"""Qwen3 as its own template asks it; its padding has id 151643. A family replaces layers and
template where it has others."""

_SECTIONED_ROTARY = {
    "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24],
}  # fmt: skip
QWEN2_5_VL = replace(
    QWEN3,
    name="Qwen2.5-VL",
    layers=(-1,),
    kind="Qwen2_5_VLText",
    model_type="qwen2_5_vl_text",
    unstated={"head_dim": 128, "rms_norm_eps": 1e-6, "rope_parameters": _SECTIONED_ROTARY},
    published={
        "Qwen2.5-VL 7B": {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6, "rope_parameters": _SECTIONED_ROTARY,
        },
    },
    norms_heads=False,
)  # fmt: skip
"""The part of Qwen2.5-VL that reads; with `vision`, all of it."""

_MULTIMODAL_ROTARY = {
    "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}  # fmt: skip
QWEN3_VL = replace(
    QWEN3,
    name="Qwen3-VL",
    kind="Qwen3VLText",
    model_type="qwen3_vl_text",
    unstated={"rms_norm_eps": 1e-6, "rope_parameters": _MULTIMODAL_ROTARY},
    published={
        f"Qwen3-VL {size}": {
            **{name: value for name, value in _QWEN3.items() if name != "rope_theta"},
            "hidden_size": width, "intermediate_size": hidden, "rope_parameters": _MULTIMODAL_ROTARY,
        }
        for size, width, hidden in (("4B", 2560, 9728), ("8B", 4096, 12288))
    },
)  # fmt: skip
"""The part of Qwen3-VL that reads: its tokens of text have one position on all three axes, so it
differs from Qwen3 in weights and in the base of its frequencies."""
