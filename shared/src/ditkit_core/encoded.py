"""What the cache holds of one sample, as training items."""

from dataclasses import dataclass

from torch import Tensor

from ditkit_core.cache import Cache
from ditkit_core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EncodedSample:
    """One sample by its cache keys; its tensors are read when they are needed."""

    id: str
    cache: Cache
    media_key: str
    text_key: str
    empty_text_key: str
    """The empty caption, for caption dropout."""

    def load(self, *, drop_caption: bool = False) -> dict[str, Tensor]:
        """The sample as a training item: `latents` and the model's own tensors, on the CPU.

        Args:
            drop_caption: Give the empty caption in place of the sample's own.

        Raises:
            UserError: If an entry has gone from the cache since it was encoded.
        """
        item: dict[str, Tensor] = {}
        for kind, key in (("media", self.media_key), ("text", self.empty_text_key if drop_caption else self.text_key)):
            tensors = self.cache.get(kind, key)
            if tensors is None:
                raise UserError(
                    f"the cache {self.cache.folder} has lost {kind} of {self.id!r}; start again to encode it"
                )
            item.update(tensors)
        return item
