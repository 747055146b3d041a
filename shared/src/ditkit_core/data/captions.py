"""Captions before encoding: adding the trigger word and shuffling tags.

All variants are fixed when the dataset is read, from the seed and the caption. So each text is
encoded once and then read from the cache.
"""

import math
import re

from ditkit_core.data.config import DataConfig
from ditkit_core.io.rng import seed_of

_FEW_TAGS = 5
"""More tags than this have more orders (5! = 120) than `data.tag_variants` can ask for (64)."""
_MOST_TRIES = 1024
"""Shuffles that are tried to find different orders; a caption that repeats a tag has fewer orders
than the factorial says."""


def captions_of(stored_captions: tuple[str, ...], config: DataConfig) -> tuple[str, ...]:
    """The different captions that a sample is trained with; the first one keeps its tags in the
    written order."""
    captions: dict[str, None] = {}  # a dict and not a set: the order is part of the result
    for caption in stored_captions:
        orders = tag_orders(caption, config) if config.shuffle_tags else (caption,)
        captions |= dict.fromkeys(with_trigger(order, config) for order in orders)
    return tuple(captions)


def with_trigger(caption: str, config: DataConfig) -> str:
    """A caption with the trigger word in front, unless it already contains it as a separate
    word."""
    trigger = config.trigger.strip()
    if not trigger or has_trigger(caption, trigger):
        return caption
    between = f"{config.tag_separator} " if config.shuffle_tags else " "
    return f"{trigger}{between}{caption}"


def has_trigger(caption: str, trigger: str) -> bool:
    """Whether a caption contains the trigger word as a separate word, in this spelling."""
    return re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption) is not None


def tag_orders(caption: str, config: DataConfig) -> tuple[str, ...]:
    """A caption as written, then with its tags shuffled; up to `data.tag_variants` different
    orders, fewer if it has few tags."""
    tags = [tag.strip() for tag in caption.split(config.tag_separator) if tag.strip()]
    if not tags:
        return (caption,)
    leading, loose = tags[: config.keep_tags], tags[config.keep_tags :]
    trigger = config.trigger.strip()
    if trigger in loose:  # the trigger word comes first, wherever it was written
        loose.remove(trigger)
        leading.insert(0, trigger)
    wanted = min(config.tag_variants, math.factorial(min(len(loose), _FEW_TAGS)))
    orders: dict[str, None] = {}
    for number in range(_MOST_TRIES):
        order = list(range(len(loose)))
        # Sorting by a hash and not random.shuffle: the order stays the same across Python versions.
        if number:
            order.sort(
                key=lambda index: (seed_of(config.seed, "tags", caption, number, index), index)
            )
        orders[f"{config.tag_separator} ".join(leading + [loose[index] for index in order])] = None
        if len(orders) == wanted:
            break
    return tuple(orders)
