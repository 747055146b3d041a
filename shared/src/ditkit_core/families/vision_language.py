"""Prompts with pictures to features: a language model that sees, from a folder or a single file.

Text and pictures go through their layers one after the other, as captions do in `text.py`: whole on
the device, or each layer read from its file for all prompts of a call, with the same bits.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ditkit_core.errors import UserError
from ditkit_core.families.language_models import VisionTower
from ditkit_core.families.text import LanguageModelEncoder, features
from ditkit_core.families.vision_tower import Sight, mrope_positions, patches_of, seen_rows
from ditkit_core.io.console import NullProgress


class VisionLanguageEncoder(LanguageModelEncoder):
    """Prompts to token features; an `Encoder` of the core for a family with a `picture_size`."""

    @property
    def vision(self) -> VisionTower:
        """What the language model sees with."""
        if self.family.vision is None:
            raise UserError(
                f"{self.family.name} reads captions alone as {self.encoding.reader} uses it; give "
                f"its TextFamily a `vision`"
            )
        return self.family.vision

    @torch.no_grad()
    def encode(
        self, items: Sequence[Any], advance: Callable[[float], None] = NullProgress.advance
    ) -> list[dict[str, Tensor]]:
        """Features of items, at most `items_at_once`, each a `Prompt`.

        For each, `text` [tokens, width] in the encoder's dtype, on the CPU: a row for each token of
        the prompt, a picture's slots included, except for the `dropped` ones; there is no padding.
        With `VisionTower.divides_text` there are several, without slots.

        Raises:
            UserError: If a prompt has more pictures than its number of tokens has room for.
        """
        tower = self._model.visual
        patches = {
            number: patches_of(self.vision, tower.config, item.pictures)
            for number, item in enumerate(items)
            if item.pictures
        }
        grids = [
            [grid.slots for grid in patches[number].grids] if number in patches else []
            for number in range(len(items))
        ]
        ids = [
            self._prompt_tokens(item.text, sizes).to(self._device)
            for item, sizes in zip(items, grids, strict=True)
        ]
        are_slots = [tokens == self._prompter.slots[0] for tokens in ids]
        positions = [
            mrope_positions(slots.tolist(), sizes).to(self._device)
            for slots, sizes in zip(are_slots, grids, strict=True)
        ]
        visible = (
            seen_rows(tower, [*patches.values()], self._device, self._passing) if patches else []
        )
        sights = {
            number: Sight(are_slots[number].nonzero()[:, 0], *rows)
            for number, rows in zip(patches, visible, strict=True)
        }
        texts = features(
            self.family, self._rotary, ids, [None] * len(ids), positions, self._passing, advance,
            sights,
        )  # fmt: skip
        dropped = self._prompter.dropped
        if not self.vision.divides_text:
            return [{"text": text[dropped:]} for text in texts]
        return [
            _divided(text[dropped:], slots[dropped:].tolist(), sizes)
            for text, slots, sizes in zip(texts, are_slots, grids, strict=True)
        ]

    def _words(self, caption: str, num_pictures: int) -> tuple[str, str]:
        vision = self.vision
        while vision.slot in caption:  # removing one can make another
            caption = caption.replace(vision.slot, "")
        numbered = (
            vision.picture.replace("{number}", str(number + 1)) for number in range(num_pictures)
        )
        return caption, vision.between.join(numbered)

    def _prompt_tokens(self, text: str, grids: Sequence[tuple[int, int]]) -> Int64[Tensor, " _"]:
        """Tokens of a text behind its pictures, with a slot for each row that is seen of one."""
        padded, real = self._tokens(*self._words(text, len(grids)))
        tokens, sizes = padded[real], iter(grids)
        if int((tokens == self._prompter.slots[0]).sum()) != len(grids):
            raise UserError(
                f"{len(grids)} pictures are too many for the {self.encoding.num_tokens} tokens of a "
                f"prompt of {self.encoding.reader}; give it fewer"
            )
        counts = [
            rows * columns
            for token in tokens.tolist()
            for rows, columns in [next(sizes) if token in self._prompter.slots else (1, 1)]
        ]
        return tokens.repeat_interleave(torch.tensor(counts))


def _divided(
    text: Float[Tensor, "tokens width"], is_slot: list[bool], sizes: Sequence[tuple[int, int]]
) -> dict[str, Tensor]:
    """The features between pictures, as of `VisionTower.divides_text`, in memory of their own."""
    items, behind = dict[str, Tensor](), 0
    for number, size in enumerate(sizes):
        start = is_slot.index(True, behind)
        items[f"text.{number}"] = text[behind:start].clone()
        behind = start + math.prod(size)
    return {**items, "text": text[behind:].clone() if sizes else text}
