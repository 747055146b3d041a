"""Captions to tokens of the text encoders: their chat templates, written out.

The templates stored next to a tokenizer are programs (Jinja), and ditkit runs no program from a file. The same words in another
template are other tokens, so the template is part of the encoder's identity.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.weights.tokenizer import added_tokens

TEXT_TOKENS = 512
"""Tokens of a caption, with its template and padding; longer captions are cut. The transformer attends to all of them."""

# As the official code has it, in `src/flux2/system_messages.py` of black-forest-labs/flux2: with a line break after "object".
_SYSTEM_MESSAGE = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object relationships, "
    "object\nattribution and actions without speculation."
)


@dataclass(frozen=True, kw_only=True)
class TextFamily:
    """The chat template of one family of language models, and the layers whose hidden states are the features."""

    name: str
    layers: tuple[int, ...]
    """The numbers of layers after which hidden states are taken."""
    before: str
    """The template before the caption."""
    after: str
    """The template after the caption."""
    removed: str
    """A token that is removed from captions, because it would stand for an image; empty for none."""
    special: tuple[str, ...]
    """Tokens of the template that must not be split into pieces."""
    padding: str
    pads_left: bool
    """Whether the padding is before the tokens."""

    def render(self, caption: str) -> str:
        """The prompt of a caption: the caption in its template."""
        return self.before + (caption.replace(self.removed, "") if self.removed else caption) + self.after


MISTRAL = TextFamily(
    name="Mistral 3",
    layers=(10, 20, 30),
    before=f"<s>[SYSTEM_PROMPT]{_SYSTEM_MESSAGE}[/SYSTEM_PROMPT][INST]",
    after="[/INST]",
    removed="[IMG]",
    special=("<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    padding="<pad>",
    pads_left=True,
)
"""The text encoder of FLUX.2-dev; its padding has id 11."""

QWEN = TextFamily(
    name="Qwen3",
    layers=(9, 18, 27),
    before="<|im_start|>user\n",
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    removed="",
    special=("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    padding="<|endoftext|>",
    pads_left=False,
)
"""The text encoder of FLUX.2-klein; its padding has id 151643."""


class Prompter:
    """A tokenizer of captions in the template of one family."""

    def __init__(self, folder: Path, family: TextFamily):
        """Check the tokenizer's own file; the tokenizer itself is built by `load`.

        Raises:
            UserError: If it is not the tokenizer of the family.
        """
        self.file = folder / "tokenizer.json"
        self._family = family
        token_ids = added_tokens(folder)
        if missing := [token for token in (*family.special, family.padding) if token not in token_ids]:
            raise UserError(
                f"{self.file} has no token {missing[0]}: it is not the tokenizer of {family.name} as FLUX.2 uses it; "
                "set model.tokenizer to the one that came with the text encoder"
            )
        self._padding = token_ids[family.padding]
        self._tokenizer: Any = None

    def load(self, vocabulary_size: int) -> None:
        """Build the tokenizer.

        Args:
            vocabulary_size: Number of tokens that the encoder has embeddings for.

        Raises:
            UserError: If the tokenizer has more tokens.
        """
        from tokenizers import Tokenizer

        with given_to_library(
            f"{self.file} is not a tokenizer that can be read", "fetch it again, or set model.tokenizer"
        ):
            self._tokenizer = Tokenizer.from_file(str(self.file))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if largest >= vocabulary_size:
            raise UserError(
                f"{self.file} has token {largest}, and the text encoder knows {vocabulary_size}: they do not belong "
                "together; set model.tokenizer to the one that came with the text encoder"
            )

    @property
    def is_loaded(self) -> bool:
        """Whether the tokenizer is built."""
        return self._tokenizer is not None

    def unload(self) -> None:
        """Free the tokenizer."""
        self._tokenizer = None

    def cut_of(self, caption: str) -> tuple[int, str] | None:
        """Number of tokens that are cut, and the part of the caption that is read; None if all of it is read."""
        rendered = self._family.render(caption)
        encoding = self._tokenizer.encode(rendered, add_special_tokens=False)
        cut = len(encoding.ids) - TEXT_TOKENS
        if cut <= 0:
            return None
        end = min(encoding.offsets[TEXT_TOKENS - 1][1], len(rendered) - len(self._family.after))
        return cut, rendered[len(self._family.before) : end]

    def tokens(self, caption: str) -> tuple[Tensor, Tensor, int]:
        """Ids [512] of a caption in its template, a mask [512] that is False on padding, and the number of tokens that were cut."""
        ids = self._tokenizer.encode(self._family.render(caption), add_special_tokens=False).ids
        cut = max(0, len(ids) - TEXT_TOKENS)
        ids = ids[:TEXT_TOKENS]
        padded = torch.full((TEXT_TOKENS,), self._padding)
        real = torch.zeros(TEXT_TOKENS, dtype=torch.bool)
        region = slice(TEXT_TOKENS - len(ids), None) if self._family.pads_left else slice(len(ids))
        padded[region] = torch.tensor(ids)
        real[region] = True
        return padded, real, cut
