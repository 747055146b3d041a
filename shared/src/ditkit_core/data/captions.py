"""What becomes of a caption before it is encoded: the trigger word, and orders of its tags.

Everything is decided when a dataset is read, by seed and caption: so each text is encoded once, and the cache serves every use.
"""

import math
import re

from ditkit_core.data.config import DataConfig
from ditkit_core.io.rng import seed_of

_FEW_TAGS = 5
"""More tags have more orders than are ever asked for."""
_DRAWS = 1024
"""Orders that are drawn to find different ones: of tags that occur twice there are fewer."""


def captions_of(written: tuple[str, ...], config: DataConfig) -> tuple[str, ...]:
    """The captions that a sample is trained with, no two alike; the first is the first as written.

    Args:
        written: As the dataset has them.
        config: The `[data]` section.
    """
    found: dict[str, None] = {}
    for caption in written:
        orders = tag_orders(caption, config) if config.shuffle_tags else (caption,)
        found |= dict.fromkeys(with_trigger(order, config) for order in orders)
    return tuple(found)


def with_trigger(caption: str, config: DataConfig) -> str:
    """A caption with the trigger word in front, if it does not have it as a word of its own."""
    trigger = config.trigger.strip()
    if not trigger or re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption):
        return caption
    between = f"{config.tag_separator} " if config.shuffle_tags else " "
    return f"{trigger}{between}{caption}"


def tag_orders(caption: str, config: DataConfig) -> tuple[str, ...]:
    """A caption as written, and with its tags in other orders, no two alike; a caption of few tags has fewer orders."""
    tags = [tag.strip() for tag in caption.split(config.tag_separator) if tag.strip()]
    if not tags:
        return (caption,)
    kept, loose = tags[: config.keep_tags], tags[config.keep_tags :]
    trigger = config.trigger.strip()
    if trigger in loose:  # it leads, wherever it was written
        loose.remove(trigger)
        kept.insert(0, trigger)
    wanted = min(config.tag_variants, math.factorial(min(len(loose), _FEW_TAGS)))
    orders: dict[str, None] = {}
    for number in range(_DRAWS):
        places = list(range(len(loose)))
        if number:
            places.sort(key=lambda place: (seed_of(config.seed, "tags", caption, number, place), place))
        orders[f"{config.tag_separator} ".join(kept + [loose[place] for place in places])] = None
        if len(orders) == wanted:
            break
    return tuple(orders)
