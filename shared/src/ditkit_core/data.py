"""Which samples make up which micro-batch: a function of the seed and the micro-batch's index, never of history."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ditkit_core.encoded import EncodedSample
from ditkit_core.errors import UserError
from ditkit_core.randomness import generator, seed_of


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch."""

    ids: list[str]
    items: list[dict[str, Tensor]]
    """Per sample `latents` and the model's own tensors, on the CPU."""


def epoch_order(seed: int, epoch: int, ids: Sequence[str]) -> list[int]:
    """The order of one epoch, as indices into `ids`.

    Sorting by a hash rather than drawing a permutation: the order depends on nothing but the ids, whatever order they
    are given in, and another sample among them leaves the order of the rest as it was.

    Args:
        seed: The run's seed.
        epoch: Epochs since the start of the run.
        ids: Sample ids, all different.
    """
    return sorted(range(len(ids)), key=lambda i: (seed_of(seed, "order", epoch, ids[i]), ids[i]))


def split_held_out(ids: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """Set samples aside that are never trained on, chosen by a hash of their ids: adding clips moves at most as many.

    Args:
        ids: Sample ids.
        count: How many to set aside.

    Returns:
        Ids to train on and ids held out, each in the order given.

    Raises:
        UserError: If nothing would be left to train on.
    """
    if count >= len(ids):
        raise UserError(
            f"holding out {count} of {len(ids)} clips leaves none to train on; lower held_out.clips or add clips"
        )
    held_out = set(sorted(ids, key=lambda id: seed_of("held out", id))[:count])
    return [id for id in ids if id not in held_out], [id for id in ids if id in held_out]


class TrainingData:
    """The endless sequence of micro-batches of a run.

    Epochs follow each other without a gap: a micro-batch may hold the end of one and the start of the next, so every
    sample is used once per epoch and every micro-batch has the same size.
    """

    def __init__(
        self, samples: Sequence[EncodedSample], *, seed: int, batch_size: int, caption_dropout: float = 0.0
    ) -> None:
        """Describe the data; nothing is read yet.

        Args:
            samples: What to train on, at least one.
            seed: The run's seed.
            batch_size: Samples per micro-batch.
            caption_dropout: Probability in [0, 1] that a sample is given with the empty caption.
        """
        assert samples and batch_size > 0 and 0 <= caption_dropout <= 1
        self._samples = samples
        self._ids = [sample.id for sample in samples]
        self._seed = seed
        self._batch_size = batch_size
        self._caption_dropout = caption_dropout
        # A micro-batch may touch two epochs; the orders are kept from one call to the next.
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: epoch_order(seed, epoch, self._ids))

    def micro_batch(self, index: int) -> Batch:
        """Read the micro-batch of this index, counted since the start of the run."""
        first = index * self._batch_size
        samples = [self._sample(position) for position in range(first, first + self._batch_size)]
        items = [sample.load(drop_caption=self._drops_caption(index, sample.id)) for sample in samples]
        return Batch(ids=[sample.id for sample in samples], items=items)

    def _sample(self, position: int) -> EncodedSample:
        epoch, place = divmod(position, len(self._samples))
        return self._samples[self._order(epoch)[place]]

    def _drops_caption(self, index: int, id: str) -> bool:
        drawn = torch.rand((), generator=generator(self._seed, "caption", index, id))
        return bool(drawn < self._caption_dropout)
