"""A sample in the cache, and how it becomes a training item."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ditkit_core.data.masks import MASK
from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.loss_masks import weighted
from ditkit_core.errors import UserError, argument
from ditkit_core.models.spec import identity

Found = TypeVar("Found")

EMPTY_CAPTION_PREFIX = "empty_caption."
"""Prefix of the tensors of the empty caption in a training item that has them next to its own
tensors."""
SLIDER_PREFIXES = ("slider_positive.", "slider_negative.")
"""Prefixes of the tensors of a slider's two prompts, likewise."""


def with_caption(item: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A training item with the caption that it has under a prefix next to its own; UserError if it
    has none."""
    texts = {
        name.removeprefix(prefix): tensor
        for name, tensor in item.items()
        if name.startswith(prefix)
    }
    # a loop of somebody's own; commands encode what their settings need
    if not texts and prefix in SLIDER_PREFIXES:
        raise UserError(
            f"{argument('flow.slider_positive')} needs items that have the slider's prompts too; "
            f"encode them with slider = (positive, negative)"
        )
    if not texts:
        raise UserError(
            f"{argument('flow.target_guidance')} needs items that have the empty caption too; "
            f"encode them with empty_captions = True"
        )
    return {**item, **texts}


class Condition(NamedTuple):
    """The place of a sample's condition in the cache."""

    kind: str
    key: str
    optional: bool
    """Whether the sample can be used without it."""


@dataclass(frozen=True, kw_only=True)
class EncodedSample:
    """A sample as a set of cache keys; its tensors are read only when they are needed."""

    id: str
    cache: Cache
    media_key: str
    text_keys: tuple[str, ...]
    """Keys of the captions, at least one."""
    empty_text_key: str
    """Key of the empty caption, for caption dropout."""
    reference_keys: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    more_text_keys: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Keys of captions whose tensors items have next to their own, by prefix, for
    `with_caption`."""
    assemble: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = identity
    """`TrainingSpec.assemble`."""
    mask_weight: float = 0.0
    """Weight of the loss where the sample's mask is black, if it has one."""
    repeats: float = 1.0
    """Average number of uses per epoch."""
    mirrored: "EncodedSample | None" = None
    """The same sample, mirrored left to right, which half of its uses take; None if all take this
    one."""
    encode_again: Callable[[], object] = field(default=lambda: None, compare=False, repr=False)
    """Encodes what the cache lacks, after an entry turned out to be damaged."""

    @property
    def keys(self) -> list[str]:
        """All keys in one list, which identifies the sample's content; runs record it to notice
        changed data."""
        references = [f"reference {key}" for key in self.reference_keys]
        conditions = [f"{kind} {key}" for kind, key, _ in self.conditions]
        both = [self.media_key, *self.text_keys, *references, *conditions]
        return both + ([f"mirrored {key}" for key in self.mirrored.keys] if self.mirrored else [])

    @property
    def caption_keys(self) -> list[str]:
        """The keys of all texts that items may have, with the keys of the mirrored sample."""
        keys = [self.empty_text_key, *self.text_keys, *self.more_text_keys.values()]
        return keys + (self.mirrored.caption_keys if self.mirrored else [])

    @property
    def item_keys(self) -> list[str]:
        """The keys of all parts but the captions, as the cache has them."""
        return [self.media_key, *self.reference_keys, *(key for _, key, _ in self.conditions)]

    def load(
        self, *, caption: int = 0, drop_caption: bool = False, drop_controls: bool = False
    ) -> dict[str, Tensor]:
        """Read the sample as a training item: `latents`, `reference.0`, … and the model's own
        tensors, on the CPU.

        `drop_caption` takes the empty caption instead of the sample's own, `drop_controls` leaves
        out optional conditions.

        Raises:
            UserError: If an entry was removed after it was encoded, or is damaged and cannot be
                encoded again.
        """
        item = self._read_encoded("media", self.media_key, self.cache.get)
        for number, key in enumerate(self.reference_keys):
            item[f"reference.{number}"] = self._read_encoded("media", key, self.cache.get)[
                "latents"
            ]
        for kind, key, optional in self.conditions:
            if not (optional and drop_controls):
                item |= self._read_encoded(kind, key, self.cache.get)
        text_key = self.empty_text_key if drop_caption else self.text_keys[caption]
        captioned = self._item(item | self._read_encoded("text", text_key, self.cache.get))
        for prefix, key in self.more_text_keys.items():
            # A family's `assemble` may add tensors that it makes from the caption: another caption
            # needs its own.
            other = self.assemble(item | self._read_encoded("text", key, self.cache.get))
            captioned |= {
                f"{prefix}{name}": tensor for name, tensor in other.items() if name not in item
            }
        return captioned

    def media_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors except the text's, which samples of one micro-batch share.
        Reads headers only."""
        shapes = self._read_encoded("media", self.media_key, self.cache.shapes)
        for number, key in enumerate(self.reference_keys):
            shapes[f"reference.{number}"] = self._read_encoded("media", key, self.cache.shapes)[
                "latents"
            ]
        for kind, key, _ in self.conditions:
            shapes |= self._read_encoded(kind, key, self.cache.shapes)
        return shapes

    def outline(self) -> dict[str, Tensor]:
        """The training item with the first caption on the `meta` device: only shapes, for counting
        tokens."""
        shapes = self.media_shapes() | self._read_encoded(
            "text", self.text_keys[0], self.cache.shapes
        )
        return self._item(
            {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        )

    def _item(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = tensors.pop(MASK.name, None)
        item = self.assemble(tensors)
        return item if mask is None else weighted(item, mask, self.mask_weight)

    def _read_encoded(
        self, kind: str, key: str, read: Callable[[str, str], dict[str, Found] | None]
    ) -> dict[str, Found]:
        return self.cache.read_encoded(read, kind, key, f"{kind} of {self.id!r}", self.encode_again)
