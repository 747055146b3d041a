"""Captions to tokens of language models: their chat templates, written out.

The templates stored next to a tokenizer are programs (Jinja), and ditkit runs no program from a file. The same words in another
template are other tokens, so the template is part of the encoder's identity.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.families.language_models import TextEncoding, TextFamily
from ditkit_core.weights.tokenizer import added_tokens


class Prompter:
    """A tokenizer of captions in the template of one family."""

    def __init__(self, folder: Path, family: TextFamily, encoding: TextEncoding):
        """Check the tokenizer's own file; the tokenizer itself is built by `load`."""
        self.file = folder / "tokenizer.json"
        self._family, self._num_tokens = family, encoding.num_tokens
        token_ids = added_tokens(folder)
        if missing := [token for token in (*family.special, family.padding) if token not in token_ids]:
            raise UserError(
                f"{self.file} has no token {missing[0]}: it is not the tokenizer of {family.name} as {encoding.reader} uses it; "
                "set model.tokenizer to the one that came with the text encoder"
            )
        self._padding = token_ids[family.padding]
        self._tokenizer: Any = None

    def load(self, vocabulary_size: int) -> None:
        """Build the tokenizer; UserError if it has more tokens than the encoder has embeddings for."""
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
        cut = len(encoding.ids) - self._num_tokens
        if cut <= 0:
            return None
        end = min(encoding.offsets[self._num_tokens - 1][1], len(rendered) - len(self._family.after))
        return cut, rendered[len(self._family.before) : end]

    def tokens(self, caption: str) -> tuple[Tensor, Tensor, int]:
        """Ids [tokens] of a caption in its template, a mask [tokens] that is False on padding, and the number of tokens that were cut."""
        ids = self._tokenizer.encode(self._family.render(caption), add_special_tokens=False).ids
        cut = max(0, len(ids) - self._num_tokens)
        ids = ids[: self._num_tokens]
        padded = torch.full((self._num_tokens,), self._padding)
        real = torch.zeros(self._num_tokens, dtype=torch.bool)
        region = slice(self._num_tokens - len(ids), None) if self._family.pads_left else slice(len(ids))
        padded[region] = torch.tensor(ids)
        real[region] = True
        return padded, real, cut
