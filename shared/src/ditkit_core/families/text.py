"""Captions to features: hidden states of a language model, from a folder or a single file.

One loop over the layers serves two modes: all layers on the device, or streamed, where each layer
is read from its file, used for every caption of the call, and freed. The results are bitwise
identical, because a layer takes one caption at a time in both.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.families.language_models import TextEncoding, TextFamily
from ditkit_core.families.text_model import (
    ATTENTION,
    build_layers,
    describe,
    locate_weights,
    published,
    rotary_of,
)
from ditkit_core.families.vision_tower import HOW_IT_SEES, Sight, patches_of, seen_rows
from ditkit_core.io.console import NullProgress, say, warn
from ditkit_core.io.memory import process_peak_bytes
from ditkit_core.models.encoders import AuxiliaryModel, LayerContext, Streaming
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.state_dict import TensorSlice
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_core.weights.frozen import fingerprint
from ditkit_core.weights.layer_streaming import LayerStreamer, below, decide, give_back_large_blocks
from ditkit_core.weights.load import load_into
from ditkit_core.weights.quantize import hold_as_stored, stored_bytes, stored_formats
from ditkit_core.weights.tokenizer import added_tokens, find_tokenizer


class Prompter:
    """A tokenizer of captions in the template of one family.

    The templates stored next to a tokenizer are programs (Jinja), and ditkit runs no program from a
    file. The same words in another template are other tokens, so the template is part of the
    encoder's identity.
    """

    def __init__(self, folder: Path, family: TextFamily, encoding: TextEncoding):
        """Check the tokenizer's own file; the tokenizer itself is built by `load`."""
        self.file = folder / "tokenizer.json"
        self._family, self._encoding, self._num_tokens = family, encoding, encoding.num_tokens
        token_ids, vision = added_tokens(folder), family.vision
        slots = [vision.slot] if vision else []
        if missing := [
            token for token in (*family.special, family.padding, *slots) if token not in token_ids
        ]:
            raise UserError(
                f"{self.file} has no token {missing[0]}: it is not the tokenizer of {family.name} "
                f"as {encoding.reader} uses it; "
                "set model.tokenizer to the one that came with the text encoder"
            )
        self._padding = token_ids[family.padding]
        self.slots = [token_ids[token] for token in slots]
        """Tokens that stand for a row of a picture."""
        self._tokenizer: Any = None

    def load(self, vocabulary_size: int) -> None:
        """Build the tokenizer; UserError if it has more tokens than the encoder has embeddings
        for."""
        from tokenizers import Tokenizer

        with given_to_library(
            f"{self.file} is not a tokenizer that can be read",
            "fetch it again, or set model.tokenizer",
        ):
            self._tokenizer = Tokenizer.from_file(str(self.file))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if largest >= vocabulary_size:
            raise UserError(
                f"{self.file} has token {largest}, and the text encoder knows {vocabulary_size}: "
                f"they do not belong "
                "together; set model.tokenizer to the one that came with the text encoder"
            )

    @property
    def is_loaded(self) -> bool:
        """Whether the tokenizer is built."""
        return self._tokenizer is not None

    def unload(self) -> None:
        """Free the tokenizer."""
        self._tokenizer = None

    def cut_of(self, caption: str, pictures: str = "") -> tuple[int, str] | None:
        """Number of tokens that are cut, and the part of the caption that is read; None if all of
        it is read. Arguments as for `tokens`."""
        rendered, start = self._rendered(caption, pictures)
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        cut = len(encoding.ids) - self._num_tokens
        if cut <= 0:
            return None
        last = self._num_tokens - len(self._end()) - 1
        end = min(encoding.offsets[last][1], len(rendered) - len(self._family.after))
        return cut, rendered[start:end]

    def _rendered(self, caption: str, pictures: str) -> tuple[str, int]:
        """A caption in its template behind its pictures, and where it starts there."""
        rendered, start = self._family.render(caption), len(self._family.before)
        return rendered[:start] + pictures + rendered[start:], start + len(pictures)

    def _end(self) -> list[int]:
        """The tokens that stay behind a caption that is cut."""
        text = self._family.after if self._encoding.keeps_end else ""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def dropped(self) -> int:
        """Number of tokens in front of a caption whose features are no part of the result."""
        turn = self._tokenizer.encode(self._family.dropped_turn, add_special_tokens=False).ids
        return self._family.dropped + len(turn)

    def tokens(self, caption: str, pictures: str = "") -> tuple[Tensor, Tensor, int]:
        """Ids [tokens] of a caption in its template, with the words of its pictures in front of it,
        a mask [tokens] that is False on padding, and the number of tokens that were cut."""
        rendered, _ = self._rendered(caption, pictures)
        ids = self._tokenizer.encode(rendered, add_special_tokens=False).ids
        cut = max(0, len(ids) - self._num_tokens)
        if cut:
            end = self._end()
            ids = ids[: self._num_tokens - len(end)] + end
        length = self._encoding.padded(len(ids))
        padded = torch.full((length,), self._padding)
        real = torch.zeros(length, dtype=torch.bool)
        region = slice(length - len(ids), None) if self._family.pads_left else slice(len(ids))
        padded[region] = torch.tensor(ids)
        real[region] = True
        return padded, real, cut


_MOST_AT_ONCE = 64
_BYTES_AT_ONCE = 2**30  # of hidden states and results


class LanguageModelEncoder:
    """Captions to token features; an `Encoder` of the core."""

    def __init__(
        self,
        encoding: TextEncoding,
        components: ModelPaths,
        device: torch.device,
        dtype: torch.dtype,
        streaming: Streaming = "auto",
    ):
        """Find weights and tokenizer, and read the weights' headers; nothing is loaded."""
        self.encoding = encoding
        self._source = open_weights(components.locate("text_encoder"))
        self.family, self._config = describe(encoding, self._source)
        self._prompter = Prompter(find_tokenizer(components), self.family, encoding)
        self._device, self._dtype, self._streaming = device, dtype, streaming
        self._mapping: dict[str, tuple[TensorSlice, ...]] = {}
        self._peak_before = 0
        self.truncated: list[str] = []
        """Captions that are too long, each with the number of tokens that were cut."""

    @cached_property
    def identity(self) -> str:
        """Digest of weights, tokenizer, template, layers, dtype and attention."""
        tokenizer = fingerprint(self._prompter.file)
        rows = [] if self.encoding.keeps_padding else ["without padding"]
        # Only where they are used: identities of other encoders stay as they were.
        rows += ["after the last norm"] * self.family.last_norm
        rows += [f"without {self.family.dropped} tokens of the template"] * bool(
            self.family.dropped
        )
        rows += [f"without {self.family.dropped_turn!r}"] * bool(self.family.dropped_turn)
        rows += [f"padded to multiples of {self.encoding.window}, at 1"] * bool(
            self.encoding.window
        )
        rows += ["cut in front of the template's end"] * self.encoding.keeps_end
        rows += [f"{HOW_IT_SEES} {self.family.vision}"] * bool(self.family.vision)
        settings = (
            repr(self.family),
            self.encoding.num_tokens,
            str(self._dtype),
            ATTENTION,
            "layer-major",
        )
        return fingerprint(self._source.path, tokenizer, *settings, *rows)

    @property
    def width(self) -> int:
        """Channels of a row of features."""
        return len(self.family.layers) * self._config["hidden_size"]

    @cached_property
    def _model(self) -> Any:
        """On `meta`, except for the modules in use."""
        return build_layers(self.family, self._config)

    @cached_property
    def _rotary(self) -> nn.Module:
        return rotary_of(self._model, self._device)

    @cached_property
    def _decision(self) -> tuple[bool, str]:
        formats = stored_formats(self._model, self._source, self._located)
        num_bytes = stored_bytes(self._model.state_dict(), formats, self._dtype)
        return decide(self._streaming, num_bytes, self._device)

    @cached_property
    def _located(self) -> dict[str, tuple[TensorSlice, ...]]:
        return locate_weights(self._model, self._source)

    @property
    def streams(self) -> bool:
        """Whether layers are streamed: read one by one."""
        return self._decision[0]

    @cached_property
    def items_at_once(self) -> int:
        """1; when streamed, as many captions as memory allows, up to 64, since each call reads all
        layers."""
        if not self.streams:
            return 1
        return captions_at_once(
            self.encoding, self.family, self._config["hidden_size"], self._dtype
        )

    def load(self) -> None:
        """Read the weights onto the device; when streamed, only look up where each is."""
        if self._mapping:
            return
        # before the weights: a damaged configuration is found at once
        mapping, _ = self._located, self._rotary
        self._prompter.load(self._model.config.vocab_size)
        self._peak_before = process_peak_bytes()
        streams, why = self._decision
        if streams:
            give_back_large_blocks()
            say(
                f"text encoder: read layer by layer for {self.items_at_once} captions at a time "
                f"({why})"
            )
        else:
            say(f"text encoder: loaded into memory as a whole ({why})")
            hold_as_stored(self._model, stored_formats(self._model, self._source, mapping))
            load_into(
                self._model,
                self._source,
                mapping,
                device_of=lambda name: self._device,
                dtype_of=lambda name: self._dtype,
            )
        self._mapping = mapping

    def cut_of(self, caption: str, num_pictures: int = 0) -> tuple[int, str] | None:
        """Number of tokens of a caption that are cut, and the part that is read; None if all of it
        is read. Needs no weights.

        Args:
            num_pictures: References of its sample, whose words count where they are read with it.
        """
        if not self._prompter.is_loaded:
            self._prompter.load(self._model.config.vocab_size)
        return self._prompter.cut_of(*self._words(caption, num_pictures))

    def _words(self, caption: str, num_pictures: int) -> tuple[str, str]:
        """What is read of a caption, and the words of its pictures."""
        return caption, ""

    def unload(self) -> None:
        """Free the weights, and print the peak of host memory."""
        if not self._mapping:
            return
        peak = process_peak_bytes()
        if peak > self._peak_before:
            say(f"text encoder: peak host memory {peak / 2**30:.1f} GiB")
        else:
            say(
                f"text encoder: host memory stayed below its earlier peak of {peak / 2**30:.1f} GiB"
            )
        self._model.to("meta")
        self._prompter.unload()
        self._mapping = {}

    @torch.no_grad()
    def encode(
        self, items: Sequence[str], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        """Features of captions, at most `items_at_once`, which may be empty.

        For each, `text` [tokens, width] in the encoder's dtype, on the CPU: the concatenated hidden
        states after the family's layers. A row for each token of the caption and its template
        except for the `dropped` ones, or with padding, where a transformer attends to that.
        """
        tokens = [self._tokens(item) for item in items]
        ids = [caption_ids.to(self._device) for caption_ids, _ in tokens]
        masks = [attention_mask(real.to(self._device)) for _, real in tokens]
        positions = [self._positions(real).to(self._device) for _, real in tokens]
        texts = features(self.family, self._rotary, ids, masks, positions, self._passing, advance)
        if self.encoding.keeps_padding:
            return [{"text": text} for text in texts]
        dropped = self._prompter.dropped
        return [
            {"text": text[real][dropped:]} for text, (_, real) in zip(texts, tokens, strict=True)
        ]

    def _positions(self, real: Bool[Tensor, " tokens"]) -> Int64[Tensor, "1 tokens"]:
        positions = torch.arange(len(real))
        return (positions.masked_fill(~real, 1) if self.encoding.window else positions)[None]

    def _passing(self) -> LayerContext:
        """A context that gives a layer its weights: from its file when streamed; otherwise they are
        already loaded."""
        model = self._model
        if not self.streams:
            return lambda name: nullcontext(model.get_submodule(name))
        memory = LayerStreamer(self._source, device=self._device, dtype=self._dtype)
        return lambda name: memory.holding(model.get_submodule(name), below(name, self._mapping))

    def _tokens(
        self, item: str, pictures: str = ""
    ) -> tuple[Int64[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
        ids, real, cut = self._prompter.tokens(item, pictures)
        if cut:
            self.truncated.append(
                f"{item[:60]!r}… is {self.encoding.num_tokens + cut} tokens long with its "
                f"template: {cut} were cut"
            )
            warn(self.truncated[-1])
        return ids, real


def features(
    family: TextFamily,
    rotary: Any,
    ids: Sequence[Int64[Tensor, " _"]],
    masks: Sequence[Bool[Tensor, "1 1 _ _"] | None],
    positions: Sequence[Int64[Tensor, "*axes 1 _"]],
    passing: Callable[[], LayerContext],
    advance: Callable[[float], None] = NullProgress.advance,
    sights: Mapping[int, Sight] = MappingProxyType({}),
) -> list[Float[Tensor, "_ width"]]:
    """Run captions through the layers, one layer after the other: the concatenated hidden states
    after the family's layers, on the CPU.

    Args:
        rotary: Computes the rotary tables.
        ids: Tokens of each caption, which may differ in number, on the device of the weights.
        masks: What each caption's tokens attend to, on the same device.
        positions: Where each caption's tokens are, perhaps on several axes, on the same device.
        passing: Makes a context that loads one layer at a time; each call makes another one with
            its own memory.
        advance: Called after each layer of a caption, with the fraction of the caption's work.
        sights: What is seen of the pictures of captions, by their number.
    """
    with passing()("embed_tokens") as embedding:
        hidden = [embedding(caption_ids[None]) for caption_ids in ids]
    for number, sight in sights.items():
        sight.put(hidden[number])
    tables = [rotary(state, where) for state, where in zip(hidden, positions, strict=True)]
    width = len(family.layers) * hidden[0].shape[-1]
    texts = [torch.empty(state.shape[1], width, dtype=state.dtype) for state in hidden]
    # A second context: the layers share one buffer of their size, and the embedding's buffer is
    # free again.
    layer_context = passing()
    for index in range(family.layers[-1]):
        with layer_context(f"layers.{index}") as layer:
            for state, mask, where, table in zip(hidden, masks, positions, tables, strict=True):
                state.copy_(
                    layer(state, attention_mask=mask, position_ids=where, position_embeddings=table)
                )
                advance(1 / family.layers[-1])
        for number, sight in sights.items():
            sight.add(hidden[number], index)
        if family.last_norm and index + 1 == family.layers[-1]:
            with passing()("norm") as norm:
                for state in hidden:
                    state.copy_(norm(state))
        if index + 1 in family.layers:
            chunk = family.layers.index(index + 1)
            for text, state in zip(texts, hidden, strict=True):
                text.chunk(len(family.layers), dim=1)[chunk].copy_(state[0])
    return texts


def captions_at_once(
    encoding: TextEncoding, family: TextFamily, hidden_size: int, dtype: torch.dtype
) -> int:
    """Number of captions per reading of all layers, limited by memory; from the width of hidden
    states, and with one picture each where it sees."""
    tokens, pixels = encoding.usual_tokens, 0
    if family.vision is not None:
        pixels = family.vision.usual_pixels
        side = math.isqrt(pixels)
        tokens += family.vision.num_slots(side, side)
    bytes_each = tokens * (len(family.layers) + 1) * hidden_size * dtype.itemsize
    bytes_each += pixels * 3 * 3 * 4  # fp32 channels, read once and in the patches of two frames
    return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // bytes_each))


def attention_mask(real: Bool[Tensor, " tokens"]) -> Bool[Tensor, "1 1 tokens tokens"] | None:
    """The tokens that each token attends to: itself and those before it that are no padding; None
    without padding.

    transformers does the same: it leaves the mask out where a causal kernel needs none. With a
    mask, features differ in the last bits.
    """
    if bool(real.all()):
        return None
    return (
        real[None, :]
        & torch.ones(len(real), len(real), dtype=torch.bool, device=real.device).tril()
    )[None, None]


def text_model(encoding: TextEncoding, text_dim: int, components: ModelPaths) -> AuxiliaryModel:
    """The text encoder as plans count it, in the sizes of the local files or of the published one
    whose features have this width."""
    described = None
    if components.here("text_encoder"):
        described = describe(encoding, open_weights(components.locate("text_encoder")))

    def contents() -> tuple[TextFamily, dict[str, Any]]:
        return described or published(encoding, text_dim)

    def make(dtype: torch.dtype) -> nn.Module:
        return build_layers(*contents()).to(dtype)

    def read(module: nn.Module, size: tuple[int, int, int], device: torch.device) -> list[Tensor]:
        family, _ = contents()
        return _read(
            encoding,
            family,
            module,
            1,
            device,
            lambda: lambda name: nullcontext(module.get_submodule(name)),
        )

    def read_streamed(
        module: nn.Module, device: torch.device, passing: Callable[[], LayerContext]
    ) -> list[Tensor]:
        family, config = contents()
        hidden_size = config["hidden_size"]
        dtype = module.get_parameter("embed_tokens.weight").dtype
        count = captions_at_once(encoding, family, hidden_size, dtype)
        # One layer is enough: all layers have the same size, and a caption keeps only the hidden
        # state of each.
        return _read(
            encoding, replace(family, layers=(1,), last_norm=False), module, count, device, passing
        )

    return AuxiliaryModel(
        name="text encoder", stage="encode", build=make, run=read, run_streamed=read_streamed
    )


def _read(
    encoding: TextEncoding,
    family: TextFamily,
    module: Any,
    count: int,
    device: torch.device,
    passing: Callable[[], LayerContext],
) -> list[Tensor]:
    """Run padded captions, each with a mask, through the layers; or, where it sees, captions with
    a picture each."""
    tokens, sights = encoding.usual_tokens, dict[int, Sight]()
    if family.vision is not None:
        side = math.isqrt(family.vision.usual_pixels)
        picture = torch.zeros(3, side, side)
        patches = patches_of(family.vision, module.visual.config, [picture])
        visible = seen_rows(module.visual, [patches] * count, device, passing)
        num_slots = len(visible[0][0])
        slots = torch.arange(num_slots).to(device)
        sights = {number: Sight(slots, *rows) for number, rows in enumerate(visible)}
        tokens += num_slots
    ids = [torch.zeros(tokens, dtype=torch.long).to(device) for _ in range(count)]
    positions = [torch.arange(tokens)[None].to(device) for _ in ids]
    # Most captions are padded and have a mask, so the plan has one for each.
    masks = [
        None if sights else torch.ones((1, 1, tokens, tokens), dtype=torch.bool).to(device)
        for _ in ids
    ]
    return features(
        family, rotary_of(module, device), ids, masks, positions, passing, sights=sights
    )
