"""T5 and its kin as text encoders: encoder models of transformers, from a folder or a single file.

An encoder is loaded as a whole, or streamed: each layer is read from its file, used for every
caption of the call, and freed. The features are bitwise identical, because a layer takes one
caption at a time in both.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.io.console import NullProgress, say, warn
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import AuxiliaryModel, LayerContext, Streaming
from ditkit_core.models.meta import on_meta
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

CAPTIONS_STREAMED = 64
"""Captions for each reading of all layers. Their hidden states are 0.3 GB in bf16 for 512 tokens of
4,096 channels."""

_TIED = {"encoder.embed_tokens": "shared"}
_NOT_WEIGHTS = frozenset({"spiece_model"})  # ComfyUI stores the tokenizer in the same file
_KEY = "model.text_encoder"

Caption = tuple[Int64[Tensor, "1 _"], Int64[Tensor, "1 _"]]
"""Tokens [1, tokens] of a caption, padding included, and which of them are no padding."""


@dataclass(frozen=True, kw_only=True)
class T5Family:
    """A family of encoder models in transformers."""

    name: str
    """Its name in messages: `UMT5`."""

    kind: str
    """Start of the classes in transformers: `T5` for T5Config and T5EncoderModel."""

    published: Mapping[str, Any]
    """Configuration of the published model, for plans without files; a single file keeps what its
    shapes do not give."""

    to_transformers: Callable[[str], str] = lambda name: name
    """From a name in the original files to transformers'; leaves transformers' names as they
    are."""


T5_XXL = T5Family(
    name="T5",
    kind="T5",
    published={
        "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24,
        "num_heads": 64, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu",
    },
)  # fmt: skip
"""T5 1.1 XXL, the text encoder of FLUX.1, SD3, LTX-Video, CogVideoX and Mochi. Source:
google/t5-v1_1-xxl, config.json."""


@dataclass(frozen=True, kw_only=True)
class T5Encoding:
    """How a model family reads captions with an encoder model: what `TextEncoding` is for language
    models."""

    model: T5Family
    """The encoder model."""

    remedy: str
    """Where to get it, for messages."""

    num_tokens: int
    """Tokens of a caption with its end token; longer captions are cut."""

    padded: bool = True
    """Whether captions are padded to `num_tokens`. Rounding depends on the shape."""

    masked: bool = True
    """Whether the encoder's tokens attend to no padding. Otherwise features depend on it."""

    keeps_padding: bool = False
    """Whether features of padding belong to the result, because the transformer attends to them.
    Otherwise a caption has a row for each of its tokens."""

    clean: Callable[[str], str] = lambda caption: caption
    """From a caption to the text that the tokenizer reads."""

    cleaning: str = ""
    """What `clean` does, in words, for the identity of caches."""

    safe_names: Mapping[str, str] = field(default_factory=dict)
    """Files that are pickles, and the files with the same weights as safetensors; see
    `ModelPaths.locate`."""

    def __post_init__(self) -> None:
        if self.keeps_padding and not self.padded:
            raise UserError(
                f"a T5Encoding of {self.model.name} keeps features of padding and is not padded: "
                f"set padded, or leave out keeps_padding"
            )

    def find(self, components: ModelPaths) -> tuple[SafetensorsSource, dict[str, Any]]:
        """The weights' files, their headers read, and their configuration.

        Raises:
            UserError: If there are none, or they are damaged or in an unknown form.
        """
        read = partial(_config_of_file, self)
        return find_weights(components, "text_encoder", read, safe_names=self.safe_names)

    def build(self, config: Mapping[str, Any]) -> Any:
        """The encoder of a configuration, on the default device."""
        make_config, make_model = (
            resolve_name(f"transformers:{self.model.kind}{part}")
            for part in ("Config", "EncoderModel")
        )
        full = make_config.from_dict(dict(config))
        if not full.relative_attention_max_distance > full.relative_attention_num_buckets // 4 > 0:
            # the library would compute NaN
            raise ValueError(
                f"relative_attention_max_distance is {full.relative_attention_max_distance}"
            )
        return make_model(full)


class T5Encoder:
    """Captions to token features; an `Encoder` of the core."""

    def __init__(
        self,
        encoding: T5Encoding,
        components: ModelPaths,
        device: torch.device,
        dtype: torch.dtype,
        streaming: Streaming = "auto",
    ):
        """Find weights and tokenizer, and read the weights' headers; nothing is loaded.

        Raises:
            UserError: If either is missing or damaged, or the weights are in an unknown form.
        """
        self.encoding = encoding
        self._source, self._config = encoding.find(components)
        self._tokenizer_path = find_tokenizer(
            components, or_vocabulary="spiece.model", also=("tokenizer_config.json",)
        )
        self._device, self._dtype, self._streaming = device, dtype, streaming
        self._names = StateDictNames.renaming(to_native=encoding.model.to_transformers)
        self._model: Any = None
        self._mapping: dict[str, tuple[TensorSlice, ...]] = {}
        self._tokenizer: Any = None
        self.truncated: list[str] = []
        """Captions that are too long, each with the number of tokens that were cut."""

    @cached_property
    def identity(self) -> str:
        """Digest of weights, tokenizer, dtype and the way captions are cleaned, cut and padded."""
        encoding, tokenizer = self.encoding, fingerprint(self._tokenizer_path)
        # Only where they are so: identities of padded and masked encoders have no such rows.
        rows = ["not padded"] * (not encoding.padded) + ["not masked"] * (not encoding.masked)
        rows += ["with padding"] * encoding.keeps_padding
        settings = (str(self._dtype), encoding.cleaning, encoding.num_tokens)
        return fingerprint(self._source.path, tokenizer, *settings, *rows)

    @cached_property
    def _decision(self) -> tuple[bool, str]:
        model, located = self._located()
        # tied weights
        once = {name: weight for name, weight in model.state_dict().items() if name in located}
        num_bytes = stored_bytes(once, stored_formats(model, self._source, located), self._dtype)
        return decide(self._streaming, num_bytes, self._device)

    def _located(self) -> tuple[Any, dict[str, tuple[TensorSlice, ...]]]:
        """The encoder on `meta`, and where the files store its weights."""
        model = build_frozen(self.encoding.build, self._config, self._source)
        return model, locate_frozen(
            model, self._source, self._names, key=_KEY, tied=_TIED, ignore=_NOT_WEIGHTS
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
        model = build_frozen(self.encoding.build, self._config, self._source)
        load_frozen(
            model,
            self._source,
            self._names,
            device=self._device,
            dtype_of=self._dtype_of,
            key=_KEY,
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
        with given_to_library(
            f"{self._tokenizer_path} contains no tokenizer that can be read", "set model.tokenizer"
        ):
            self._tokenizer = resolve_name("transformers:AutoTokenizer").from_pretrained(
                str(self._tokenizer_path), local_files_only=True, trust_remote_code=False
            )
            # some faults show only in use
            self._tokenizer.decode(self._tokenizer("a caption").input_ids)
        if self._tokenizer.pad_token is None:
            raise UserError(
                f"{self._tokenizer_path} has no padding token: tokenizer_config.json is not the "
                "model's; fetch it again, or set model.tokenizer"
            )

    def cut_of(self, caption: str, num_pictures: int = 0) -> tuple[int, str] | None:
        """Number of tokens of a caption that are cut, and the part that is read; None if all of it
        is read. Needs no weights. It reads captions alone, whatever pictures their sample has.

        Raises:
            UserError: If the tokenizer cannot be read.
        """
        self._load_tokenizer()
        num_tokens = self.encoding.num_tokens
        ids = self._tokenizer(self.encoding.clean(caption), verbose=False).input_ids
        if len(ids) <= num_tokens:
            return None
        # one less: the last token that is read is the end token
        return len(ids) - num_tokens, self._tokenizer.decode(ids[: num_tokens - 1])

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
        """Features of captions, at most `items_at_once`; the empty one is a single end-of-sentence
        token.

        Captions are padded as in the model's training, because rounding depends on the shape. The
        result is trimmed to the caption's length, unless the transformer attends to padding.

        Args:
            items: The captions.
            advance: Called with the fraction of a caption's work that is done.

        Returns:
            For each, `text` [tokens, dim] in the encoder's dtype; a wider one would only enlarge
            the cache.
        """
        captions = [self._tokens(item) for item in items]
        masked = self.encoding.masked
        if self.streams:
            memory = LayerStreamer(self._source, device=self._device, dtype=self._dtype_of)

            def layer(name: str) -> Any:
                return memory.holding(self._model.get_submodule(name), below(name, self._mapping))

            features = read_layers(
                self._model, captions, lambda: layer, masked=masked, advance=advance
            )
        else:
            features = []
            for ids, mask in captions:
                features.append(self._model(ids, mask if masked else None).last_hidden_state[0])
                advance(1.0)
        # Copied: a part of a tensor would keep the padding alive.
        kept = zip(features, captions, strict=True)
        return [
            {
                "text": text[: len(text) if self.encoding.keeps_padding else int(mask.sum())].to(
                    "cpu", self._dtype, copy=True
                )
            }
            for text, (_, mask) in kept
        ]

    def _tokens(self, item: str) -> Caption:
        """Tokens of a caption on the device, padded, and which of them are no padding."""
        num_tokens, text = self.encoding.num_tokens, self.encoding.clean(item)
        ids = self._tokenizer(text, verbose=False).input_ids
        if len(ids) > num_tokens:
            self.truncated.append(
                f"{item[:60]!r}… is {len(ids)} tokens long: {len(ids) - num_tokens} were cut"
            )
            warn(self.truncated[-1])
        tokens = self._tokenizer(
            text,
            padding="max_length" if self.encoding.padded else False,
            max_length=num_tokens,
            truncation=True,
            return_tensors="pt",
        )
        # padding included
        used, vocab_size = tokens.input_ids.unique().tolist(), self._model.config.vocab_size
        if used[0] < 0 or used[-1] >= vocab_size:
            raise UserError(
                f"{self._tokenizer_path} has token {used[0] if used[0] < 0 else used[-1]}, and the "
                f"text encoder knows {vocab_size}: they do not belong together; set "
                "model.tokenizer to the one that came with the text encoder"
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


def read_layers(
    model: Any,
    captions: Sequence[Caption],
    passing: Callable[[], LayerContext],
    *,
    masked: bool = True,
    advance: Callable[[float], None] = NullProgress.advance,
) -> list[Float[Tensor, "_ dim"]]:
    """Run captions through the layers, one layer after the other: the model's last hidden states,
    bitwise as transformers computes them.

    Args:
        model: An encoder model of transformers.
        captions: On the device of the weights.
        passing: Makes a context that loads one layer at a time; each call makes another one with
            its own memory.
        masked: Whether tokens attend to no padding.
        advance: Called after each layer of a caption, with the fraction of the caption's work.

    Source: `T5Stack.forward` and `UMT5Stack.forward` in huggingface/transformers,
        src/transformers/models/t5/modeling_t5.py and umt5/modeling_umt5.py.
    """
    make_mask = resolve_name("transformers.masking_utils:create_bidirectional_mask")
    stack = model.encoder
    with passing()("encoder.embed_tokens") as embedding:
        hidden = [embedding(ids) for ids, _ in captions]
    masks = [
        make_mask(config=stack.config, inputs_embeds=state, attention_mask=mask if masked else None)
        for state, (_, mask) in zip(hidden, captions, strict=True)
    ]
    # A second context: the layers share one buffer of their size, and the memory of the embedding,
    # 2 GB in bf16, is free again.
    layer_context = passing()
    # T5's first block has the weights of the relative positions, and returns their bias for all
    # later ones; a block of UMT5 has its own. The bias depends on the number of tokens alone.
    shares_bias = "position_bias" in inspect.signature(stack.block[0].forward).parameters
    biases: dict[int, Tensor] = {}
    for index in range(len(stack.block)):
        with layer_context(f"encoder.block.{index}") as block:
            for caption, mask in enumerate(masks):
                state = hidden[caption]
                if shares_bias:
                    tokens = state.shape[1]
                    hidden[caption], biases[tokens], _ = block(state, mask, biases.get(tokens))
                else:
                    hidden[caption] = block(state, mask)
                advance(1 / len(stack.block))
    with layer_context("encoder.final_layer_norm") as norm:
        return [norm(state)[0] for state in hidden]


def t5_model(encoding: T5Encoding, components: ModelPaths) -> AuxiliaryModel:
    """The text encoder as plans count it, in the sizes of the local files or the published ones."""
    local = encoding.find(components) if components.here("text_encoder") else None

    def build(dtype: torch.dtype) -> nn.Module:
        if local is not None:
            model = build_frozen(encoding.build, local[1], local[0])
        else:
            with on_meta():
                model = encoding.build(encoding.model.published)
        for name, other in _TIED.items():
            model.get_submodule(name).weight = model.get_submodule(other).weight
        del model.shared  # the encoder has it too, and a state dict would count it twice
        module: nn.Module = model.to(dtype).requires_grad_(False).eval()
        return module

    def read(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> Tensor:
        ids, mask = _longest(encoding, device)
        features: Tensor = module(ids, mask if encoding.masked else None).last_hidden_state[0]
        return features

    def read_streamed(
        module: nn.Module, device: torch.device, passing: Callable[[], LayerContext]
    ) -> list[Tensor]:
        # One block is enough: all have the same size, and a caption keeps only its hidden state.
        del module.get_submodule("encoder.block")[1:]  # type: ignore[operator]
        captions = [_longest(encoding, device)] * CAPTIONS_STREAMED
        return read_layers(module, captions, passing, masked=encoding.masked)

    return AuxiliaryModel(
        name="text encoder", stage="encode", build=build, run=read, run_streamed=read_streamed
    )


def _longest(encoding: T5Encoding, device: torch.device) -> Caption:
    ids = torch.zeros(1, encoding.num_tokens, dtype=torch.long).to(device)
    return ids, torch.ones_like(ids)


def _config_of_file(encoding: T5Encoding, source: SafetensorsSource) -> dict[str, Any]:
    """The configuration of a single file: as published, with the sizes that the shapes have."""
    family = encoding.model
    shapes = {family.to_transformers(name): stored.shape for name, stored in source.tensors.items()}
    block = "encoder.block.0.layer"
    try:
        vocabulary, dim = shapes["shared.weight"]
        attention_dim = shapes[f"{block}.0.SelfAttention.q.weight"][0]
        buckets, heads = shapes[f"{block}.0.SelfAttention.relative_attention_bias.weight"]
        gated = f"{block}.1.DenseReluDense.wi_0.weight"
        ffn_dim = shapes[gated if gated in shapes else gated.replace("wi_0", "wi")][0]
        head_dim = attention_dim // heads
    except (LookupError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"{source.path} is not a {family.name} encoder; {encoding.remedy}"
        ) from error
    return {
        **family.published,
        "vocab_size": vocabulary,
        "d_model": dim,
        "d_kv": head_dim,
        "d_ff": ffn_dim,
        "num_layers": sum(name.endswith(".SelfAttention.q.weight") for name in shapes),
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
    }
