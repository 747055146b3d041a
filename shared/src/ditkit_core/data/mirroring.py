"""Which datasets may be mirrored left to right (`data.flip`): not those whose texts say which side is which."""

import re
from collections.abc import Sequence

from ditkit_core.data.dataset import Sample
from ditkit_core.errors import UserError
from ditkit_core.models.conditions import Column

_SIDES = re.compile(
    r"\b(?:left|right)(?:ward|wards|most|hand|handed|-hand|-handed|-facing)?\b|\b(?:counter|anti)?-?clockwise\b"
    r"|\b(?:links|rechts|linke[nrs]?|rechte[nrs]?|gauche|droite|izquierd[ao]|derech[ao])\b|[左右]",
    re.IGNORECASE,
)
"""Words for sides in languages that captions are written in. `right` as in "right now" is one of them: it takes a person to tell."""


def check_flip(samples: Sequence[Sample], columns: Sequence[Column]) -> None:
    """Refuse to mirror a dataset whose captions or conditions (the model's `columns`) say left or right."""
    for column in columns:
        named = next((sample for sample in samples if column.name in sample.controls), None)
        if named is not None and column.kind in ("text", "table"):
            raise UserError(
                f"data.flip cannot mirror {column.name} of {named.id} (a {column.kind}) with its clip; set data.flip = false"
            )
    sided = [
        (sample.id, match[0])
        for sample in samples
        for match in map(_SIDES.search, sample.captions)
        if match is not None
    ]
    if sided:
        id, word = sided[0]
        others = f" ({len(sided) - 1} more do)" if len(sided) > 1 else ""
        raise UserError(
            f"data.flip would train the other side than the caption of {id} says: {word!r}{others}; reword it, or set data.flip = false"
        )
