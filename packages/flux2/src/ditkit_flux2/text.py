"""Captions to features: the Mistral 3 of FLUX.2-dev or the Qwen3 of FLUX.2-klein, from a folder or a single file.

One loop over the layers serves two ways of holding them: all on the device, or each read from its file when it is needed, used
for every caption of the call, and dropped. Both give the same bits, because captions pass through a layer one by one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ditkit_core.components import Components
from ditkit_core.console import say, warn
from ditkit_core.frozen import fingerprint
from ditkit_core.memory import process_peak_bytes
from ditkit_core.model import Part, Streaming, ignored
from ditkit_core.safetensors_file import SafetensorsSource
from ditkit_core.streamed import PassingMemory, below, decide, give_back_large_blocks
from ditkit_core.tokenizer_files import find_tokenizer
from ditkit_core.weights import load_into
from ditkit_flux2.text_model import ATTENTION, build, describe, locate_weights
from ditkit_flux2.text_prompt import TEXT_TOKENS, Prompter

_MOST_AT_ONCE = 64
_BYTES_AT_ONCE = 2**30  # of hidden states and results


class TextEncoder:
    """Captions to token features; an `Encoder` of the core."""

    def __init__(self, components: Components, device: torch.device, dtype: torch.dtype, streaming: Streaming = "auto"):
        """Find weights and tokenizer, and read the weights' headers; nothing is loaded.

        Raises:
            UserError: If either is missing, damaged, or not of a model that FLUX.2 uses.
        """
        self._source = SafetensorsSource.open(components.locate("text_encoder"))
        self.family, self._config = describe(self._source)
        self._prompter = Prompter(find_tokenizer(components), self.family)
        self._device, self._dtype, self._streaming = device, dtype, streaming
        self._mapping: dict[str, tuple[Part, ...]] = {}
        self._peak_before = 0
        self.truncated: list[str] = []
        """Captions that were longer than 512 tokens, each with the number of tokens that were cut."""

    @cached_property
    def identity(self) -> str:
        """Digest of weights, tokenizer, template, layers, dtype and attention."""
        tokenizer = fingerprint(self._prompter.file)
        return fingerprint(
            self._source.path, tokenizer, repr(self.family), TEXT_TOKENS, str(self._dtype), ATTENTION, "layer-major"
        )

    @property
    def width(self) -> int:
        """Channels of a row of features."""
        return len(self.family.layers) * self._config["hidden_size"]

    @cached_property
    def _built(self) -> tuple[Any, Any]:
        return build(self.family, self._config, self._device)

    @property
    def _model(self) -> Any:
        """On `meta` but for the modules in use."""
        return self._built[0]

    @cached_property
    def _decision(self) -> tuple[bool, str]:
        num_elements = sum(tensor.numel() for tensor in self._model.state_dict().values())
        return decide(self._streaming, num_elements * self._dtype.itemsize, self._device)

    @property
    def streams(self) -> bool:
        """Whether layers pass through memory one by one."""
        return self._decision[0]

    @cached_property
    def items_at_once(self) -> int:
        """One caption; streamed, as many as a reading of all layers should serve and memory allows."""
        if not self.streams:
            return 1
        bytes_each = TEXT_TOKENS * (self.width + self._config["hidden_size"]) * self._dtype.itemsize
        return max(1, min(_MOST_AT_ONCE, _BYTES_AT_ONCE // bytes_each))

    def load(self) -> None:
        """Read the weights onto the device; streamed, only find each.

        Raises:
            UserError: If the weights are incomplete, or tokenizer and encoder do not belong together.
        """
        if self._mapping:
            return
        mapping = locate_weights(self._model, self._source)
        self._prompter.load(self._model.config.vocab_size)
        self._peak_before = process_peak_bytes()
        streams, why = self._decision
        if streams:
            give_back_large_blocks()
            say(f"text encoder: read layer by layer for {self.items_at_once} captions at a time ({why})")
        else:
            say(f"text encoder: held in memory as a whole ({why})")
            load_into(
                self._model, self._source, mapping,
                device_of=lambda name: self._device, dtype_of=lambda name: self._dtype,
            )  # fmt: skip
        self._mapping = mapping

    def unload(self) -> None:
        """Free the weights, and say how much host memory it took."""
        if not self._mapping:
            return
        peak = process_peak_bytes()
        if peak > self._peak_before:
            say(f"text encoder: peak host memory {peak / 2**30:.1f} GiB")
        else:
            say(f"text encoder: host memory stayed below its earlier peak of {peak / 2**30:.1f} GiB")
        self._model.to("meta")
        self._prompter.unload()
        self._mapping = {}

    @torch.no_grad()
    def encode(self, items: Sequence[str], advance: Callable[[float], None] = ignored) -> list[dict[str, Tensor]]:
        """Features of captions.

        Args:
            items: At most `items_at_once` captions, which may be empty.
            advance: Told of each layer that a caption has passed.

        Returns:
            For each, `text` [512, width] in the encoder's dtype, on the CPU: the hidden states after three of the layers side
            by side, padding included, because the transformer attends to it.
        """
        tokens = [self._tokens(item) for item in items]
        with self._with_weights("embed_tokens", self._memory()) as embedding:
            hidden = torch.stack([embedding(ids[None].to(self._device)) for ids, _ in tokens])
        masks = [attention_mask(real.to(self._device)) for _, real in tokens]
        positions = torch.arange(TEXT_TOKENS, device=self._device)[None]
        tables = self._built[1](hidden[0], positions)
        texts = [torch.empty(TEXT_TOKENS, self.width, dtype=self._dtype) for _ in items]
        memory = self._memory()  # of the layers, which are alike; that of the embedding is free again
        for index in range(self.family.layers[-1]):
            with self._with_weights(f"layers.{index}", memory) as layer:
                for state, mask in zip(hidden, masks, strict=True):
                    state.copy_(layer(state, attention_mask=mask, position_ids=positions, position_embeddings=tables))
                    advance(1 / self.family.layers[-1])
            if index + 1 in self.family.layers:
                chunk = self.family.layers.index(index + 1)
                for text, state in zip(texts, hidden, strict=True):
                    text.chunk(len(self.family.layers), dim=1)[chunk].copy_(state[0])
        return [{"text": text} for text in texts]

    def _with_weights(self, name: str, memory: PassingMemory) -> AbstractContextManager[Any]:
        """A module of the model, for as long as it is needed."""
        module = self._model.get_submodule(name)
        return memory.holding(module, below(name, self._mapping)) if self.streams else nullcontext(module)

    def _memory(self) -> PassingMemory:
        return PassingMemory(self._source, device=self._device, dtype=self._dtype)

    def _tokens(self, item: str) -> tuple[Int64[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
        ids, real, cut = self._prompter.tokens(item)
        if cut:
            self.truncated.append(
                f"{item[:60]!r}… is {TEXT_TOKENS + cut} tokens long with what is said around it: {cut} were cut"
            )
            warn(self.truncated[-1])
        return ids, real


def attention_mask(real: Bool[Tensor, " tokens"]) -> Bool[Tensor, "1 1 tokens tokens"] | None:
    """What each token may attend to: itself and those before it that are no padding; None where that is all before it.

    As transformers makes it, which leaves a mask out where a causal kernel does without; the rows differ in the last bits.
    """
    if bool(real.all()):
        return None
    return (real[None, :] & torch.ones(len(real), len(real), dtype=torch.bool, device=real.device).tril())[None, None]
