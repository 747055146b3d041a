"""The UMT5 text encoder, from a diffusers folder or a single file, and its tokenizer.

It is loaded as a whole, or streamed: each layer is read from its file, used for every caption of
the call, and freed. The features are bitwise identical, because a layer takes one caption at a time
in both.
"""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.io.console import NullProgress, say, warn
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import LayerContext, Streaming
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.weights.frozen import (
    build_frozen,
    find_weights,
    fingerprint,
    load_frozen,
    locate_frozen,
)
from ditkit_core.weights.layer_streaming import LayerStreamer, below, decide, give_back_large_blocks
from ditkit_core.weights.quantize import stored_bytes, stored_formats
from ditkit_core.weights.tokenizer import find_tokenizer
from ditkit_wan.encoders.safe_names import SAFE_NAMES

TEXT_TOKENS = 512
"""Tokens of a caption, with its end token; longer captions are cut."""
CAPTIONS_STREAMED = 64
"""Captions for each reading of all layers. Their hidden states are 0.3 GB in bf16."""

# Official names to the names of transformers. Source: `T5Encoder` in Wan-Video/Wan2.1,
# wan/modules/t5.py.
_IN_BLOCK = {
    "norm1": "layer.0.layer_norm",
    **{f"attn.{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"},
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}
_OUTSIDE = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}
_BLOCK = re.compile(r"^blocks\.(\d+)\.(.+)\.weight$")
_TIED = {"encoder.embed_tokens": "shared"}
_NOT_WEIGHTS = frozenset({"spiece_model"})  # ComfyUI stores the tokenizer in the same file


def to_transformers(name: str) -> str:
    """The transformers name of a parameter of the UMT5 encoder, given in either form."""
    block = _BLOCK.match(name)
    if block and block[2] in _IN_BLOCK:
        return f"encoder.block.{block[1]}.{_IN_BLOCK[block[2]]}.weight"
    module = name.removesuffix(".weight")
    return f"{_OUTSIDE[module]}.weight" if module in _OUTSIDE else name


PUBLISHED = {
    "vocab_size": 256384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "feed_forward_proj": "gated-gelu",
}
"""UMT5-XXL, the text encoder of all Wan models."""

TEXT_NAMES = StateDictNames.renaming(to_native=to_transformers)


def clean(caption: str) -> str:
    """A caption cleaned as in the authors' training: fixed encoding, no HTML entities, single
    spaces."""
    import ftfy

    caption = html.unescape(html.unescape(ftfy.fix_text(caption)))
    return re.sub(r"\s+", " ", caption).strip()


class TextEncoder:
    """Captions to token features; an `Encoder` of the core."""

    def __init__(
        self,
        components: ModelPaths,
        device: torch.device,
        dtype: torch.dtype,
        streaming: Streaming = "auto",
    ):
        """Find weights and tokenizer, and read the weights' headers; nothing is loaded.

        Raises:
            UserError: If either is missing or damaged, or the weights are in an unknown form.
        """
        self._source, self._config = config_of(components)
        self._tokenizer_path = find_tokenizer(
            components, or_vocabulary="spiece.model", also=("tokenizer_config.json",)
        )
        self._device, self._dtype, self._streaming = device, dtype, streaming
        self._model: Any = None
        self._mapping: dict[str, tuple[TensorSlice, ...]] = {}
        self._tokenizer: Any = None
        self.truncated: list[str] = []
        """Captions longer than 512 tokens, each with the number of tokens that were cut."""

    @cached_property
    def identity(self) -> str:
        """Digest of weights, tokenizer, dtype and the way captions are cleaned and cut."""
        tokenizer = fingerprint(self._tokenizer_path)
        return fingerprint(
            self._source.path,
            tokenizer,
            str(self._dtype),
            "ftfy, unescaped twice, spaces",
            TEXT_TOKENS,
        )

    @cached_property
    def _decision(self) -> tuple[bool, str]:
        model, located = self._located()
        once = {
            name: weight for name, weight in model.state_dict().items() if name in located
        }  # tied weights
        num_bytes = stored_bytes(once, stored_formats(model, self._source, located), self._dtype)
        return decide(self._streaming, num_bytes, self._device)

    def _located(self) -> tuple[Any, dict[str, tuple[TensorSlice, ...]]]:
        """The encoder on `meta`, and where the files store its weights."""
        model = build_frozen(build, self._config, self._source)
        key, ignore = "model.text_encoder", _NOT_WEIGHTS
        return model, locate_frozen(
            model, self._source, TEXT_NAMES, key=key, tied=_TIED, ignore=ignore
        )

    @property
    def streams(self) -> bool:
        """Whether layers are streamed: read one by one."""
        return self._decision[0]

    @property
    def items_at_once(self) -> int:
        """1; more when streamed, since each call reads all layers."""
        return CAPTIONS_STREAMED if self.streams else 1

    def load(self) -> None:
        """Read the weights onto the device; when streamed, only look up where each is.

        Raises:
            UserError: If the weights are incomplete, or the tokenizer cannot be read.
        """
        if self._model is not None:
            return
        self._load_tokenizer()
        if self.streams:
            give_back_large_blocks()
            say(
                f"text encoder: read layer by layer for {self.items_at_once} captions at a time "
                f"({self._decision[1]})"
            )
            model, located = self._located()
            self._mapping = located | {
                f"{name}.weight": located[f"{other}.weight"] for name, other in _TIED.items()
            }
            self._model = model.requires_grad_(False).eval()
            return
        model = build_frozen(build, self._config, self._source)
        load_frozen(
            model,
            self._source,
            TEXT_NAMES,
            device=self._device,
            dtype_of=self._dtype_of,
            key="model.text_encoder",
            tied=_TIED,
            ignore=_NOT_WEIGHTS,
        )
        for name, layer in list(model.named_modules()):
            if isinstance(layer, QuantizedLinear) and name.endswith(".wo"):
                model.set_submodule(name, _LastProjection(layer, self._dtype_of(f"{name}.weight")))
        self._model = model

    def _load_tokenizer(self) -> None:
        if self._tokenizer is not None:
            return
        from transformers import AutoTokenizer

        with given_to_library(
            f"{self._tokenizer_path} contains no tokenizer that can be read", "set model.tokenizer"
        ):
            self._tokenizer = AutoTokenizer.from_pretrained(
                str(self._tokenizer_path), local_files_only=True, trust_remote_code=False
            )
            self._tokenizer.decode(
                self._tokenizer("a caption").input_ids
            )  # some faults show only in use
        if self._tokenizer.pad_token is None:
            raise UserError(
                f"{self._tokenizer_path} has no padding token: tokenizer_config.json is not the "
                f"model's; fetch it "
                "again, or set model.tokenizer"
            )

    def cut_of(self, caption: str) -> tuple[int, str] | None:
        """Number of tokens of a caption that are cut, and the part that is read; None if all of it
        is read. Needs no weights.

        Raises:
            UserError: If the tokenizer cannot be read.
        """
        self._load_tokenizer()
        ids = self._tokenizer(clean(caption), verbose=False).input_ids
        if len(ids) <= TEXT_TOKENS:
            return None
        # one less: the last token that is read is the end token
        return len(ids) - TEXT_TOKENS, self._tokenizer.decode(ids[: TEXT_TOKENS - 1])

    def _dtype_of(self, name: str) -> torch.dtype:
        # T5's last projection overflows in fp16
        return (
            torch.float32
            if self._dtype == torch.float16 and name.endswith(".wo.weight")
            else self._dtype
        )

    def unload(self) -> None:
        """Free the weights."""
        self._model = self._tokenizer = None
        self._mapping = {}

    @torch.no_grad()
    def encode(
        self, items: Sequence[str], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        """Features of captions.

        A caption is padded to 512 tokens and the padding is masked, as in training, because
        rounding depends on the shape. The result is trimmed to the caption's length, and zeros take
        the place of the padding when inputs are made.

        Args:
            items: At most `items_at_once` captions; the empty one is a single end-of-sentence
                token.
            advance: Called with the fraction of a caption's work that is done.

        Returns:
            For each, `text` [tokens, dim] in the encoder's dtype; a wider one would only enlarge
            the cache.
        """
        tokens = [self._tokens(item) for item in items]
        if self.streams:
            memory = LayerStreamer(self._source, device=self._device, dtype=self._dtype)

            def layer(name: str) -> Any:
                return memory.holding(self._model.get_submodule(name), below(name, self._mapping))

            features = read_layers(self._model, tokens, lambda: layer, advance)
        else:
            features = []
            for ids, mask in tokens:
                features.append(read(self._model, ids, mask))
                advance(1.0)
        # Copied: a part of a tensor would keep the padding alive.
        kept = zip(features, tokens, strict=True)
        return [
            {"text": text[: int(mask.sum())].to("cpu", self._dtype, copy=True)}
            for text, (_, mask) in kept
        ]

    def _tokens(self, item: str) -> tuple[Int64[Tensor, "1 tokens"], Int64[Tensor, "1 tokens"]]:
        """Padded tokens of a caption on the device, and which of them are no padding."""
        ids = self._tokenizer(clean(item), verbose=False).input_ids
        if len(ids) > TEXT_TOKENS:
            self.truncated.append(
                f"{item[:60]!r}… is {len(ids)} tokens long: {len(ids) - TEXT_TOKENS} were cut"
            )
            warn(self.truncated[-1])
        tokens = self._tokenizer(
            clean(item),
            padding="max_length",
            max_length=TEXT_TOKENS,
            truncation=True,
            return_tensors="pt",
        )
        used, vocab_size = (
            tokens.input_ids.unique().tolist(),
            self._model.config.vocab_size,
        )  # padding included
        if used[0] < 0 or used[-1] >= vocab_size:
            raise UserError(
                f"{self._tokenizer_path} has token {used[0] if used[0] < 0 else used[-1]}, and the "
                f"text encoder knows {vocab_size}: they do "
                "not belong together; set model.tokenizer to the one that came with the text "
                "encoder"
            )
        tokens = tokens.to(self._device)
        return tokens.input_ids, tokens.attention_mask


class _LastProjection(nn.Module):
    """The last projection of a block, with a weight of 8-bit codes.

    transformers converts the layer's input to the dtype of `weight` if that is a tensor, which
    would be 8 bits here.
    """

    weight = None

    def __init__(self, layer: QuantizedLinear, dtype: torch.dtype):
        super().__init__()
        self.layer, self.dtype = layer, dtype

    def forward(self, x: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch dim"]:
        """The product in the dtype that a dense weight would have."""
        product: Tensor = self.layer(x.to(self.dtype))
        return product


def build(config: Mapping[str, Any]) -> Any:
    """The encoder of a configuration, on the default device."""
    from transformers import UMT5Config, UMT5EncoderModel

    t5_config = UMT5Config.from_dict(dict(config))
    if (
        not t5_config.relative_attention_max_distance
        > t5_config.relative_attention_num_buckets // 4
        > 0
    ):
        raise ValueError(
            f"relative_attention_max_distance is {t5_config.relative_attention_max_distance}"
        )  # NaN in the library
    return UMT5EncoderModel(t5_config)


def tie(model: Any) -> None:
    """Tie the encoder's embedding to the shared one, as `load` does."""
    for name, other in _TIED.items():
        model.get_submodule(name).weight = model.get_submodule(other).weight


def read(
    model: Any, ids: Int64[Tensor, "1 tokens"], mask: Int64[Tensor, "1 tokens"]
) -> Float[Tensor, "tokens dim"]:
    """Features of a padded caption, padding included."""
    return model(ids, mask).last_hidden_state[0]


def read_layers(
    model: Any,
    tokens: Sequence[tuple[Int64[Tensor, "1 tokens"], Int64[Tensor, "1 tokens"]]],
    passing: Callable[[], LayerContext],
    advance: Callable[[float], None] = NullProgress.advance,
) -> list[Float[Tensor, "tokens dim"]]:
    """Run padded captions through the layers, one layer after the other: what `read` computes, as
    transformers does.

    Args:
        tokens: Tokens of each caption, and which of them are no padding, on the device of the
            weights.
        passing: Makes a context that loads one layer at a time; each call makes another one with
            its own memory.
        advance: Called after each layer of a caption, with the fraction of the caption's work.

    Source: `UMT5Stack.forward` in huggingface/transformers,
        src/transformers/models/umt5/modeling_umt5.py.
    """
    from transformers.masking_utils import create_bidirectional_mask

    stack = model.encoder
    with passing()("encoder.embed_tokens") as embedding:
        hidden = [embedding(ids) for ids, _ in tokens]
    masks = [
        create_bidirectional_mask(config=stack.config, inputs_embeds=state, attention_mask=mask)
        for state, (_, mask) in zip(hidden, tokens, strict=True)
    ]
    # A second context: the layers share one buffer of their size, and the memory of the embedding,
    # 2 GB in bf16, is free again.
    layer_context = passing()
    for index in range(len(stack.block)):
        with layer_context(f"encoder.block.{index}") as block:
            for caption, mask in enumerate(masks):
                hidden[caption] = block(hidden[caption], mask)
                advance(1 / len(stack.block))
    with layer_context("encoder.final_layer_norm") as norm:
        return [norm(state)[0] for state in hidden]


def config_of(components: ModelPaths) -> tuple[SafetensorsSource, dict[str, Any]]:
    """The weights' files, their headers read, and their configuration.

    Raises:
        UserError: If there are none, or they are damaged or in an unknown form.
    """
    return find_weights(components, "text_encoder", _config_of_file, safe_names=SAFE_NAMES)


def _config_of_file(source: SafetensorsSource) -> dict[str, Any]:
    """The configuration of a single file, read from its shapes; other fields are the same for all
    UMT5 encoders."""
    shapes = {to_transformers(name): stored.shape for name, stored in source.tensors.items()}
    block = "encoder.block.0.layer"
    try:
        vocabulary, dim = shapes["shared.weight"]
        attention_dim = shapes[f"{block}.0.SelfAttention.q.weight"][0]
        buckets, heads = shapes[f"{block}.0.SelfAttention.relative_attention_bias.weight"]
        ffn_dim = shapes[f"{block}.1.DenseReluDense.wi_0.weight"][0]
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{source.path} is not a UMT5 encoder; get umt5_xxl_fp16.safetensors, or set a "
            f"text_encoder folder"
        ) from error
    layers = sum(name.endswith(".SelfAttention.q.weight") for name in shapes)
    return {
        "vocab_size": vocabulary,
        "d_model": dim,
        "d_kv": attention_dim // heads,
        "d_ff": ffn_dim,
        "num_layers": layers,
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        "feed_forward_proj": "gated-gelu",
    }
