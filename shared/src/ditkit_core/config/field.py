"""Declaring a configuration field with its resume rule: whether it may change when a run is
resumed.

The configuration consists of frozen dataclasses, each owned by the folder that uses it;
`run/config.py` only composes them. Their modules need no torch, because importing it takes seconds
and a mistake in a setting should be answered at once. Every field is declared with `setting`,
because changing a field without a resume rule would silently turn the run into another one.
"""

import dataclasses
from typing import Any, Literal

Resume = Literal["free", "stated", "refused"]

Holds = Literal["value", "path", "part", "private"]
"""Kind of text in a field: a plain `value`; a `path`, or `column=path`; a `part`, which is a path
or a hub id; `private` if it may hold a secret."""


def setting(
    default: Any,
    *,
    resume: Resume,
    holds: Holds = "value",
    formerly: tuple[str, ...] = (),
    part_of: str = "",
    varies: bool = False,
    asked_again: tuple[Any, ...] = (),
    after: str = "",
    written: Any = None,
    is_set: bool = False,
) -> Any:
    """A dataclass field with a default and a resume rule.

    Args:
        default: The default value; immutable.
        resume: `free` may change on resume silently (steps, saving, logging, placement); `stated`
            may change and is logged (learning rate); `refused` may not change, because it would
            make another run (data, adapter shape).
        holds: Kind of text; only the last part of a path is written to files that are published,
            and nothing of what is private.
        formerly: Former names of the field in this section. Stored runs may use them; in a run file
            they cause a message with the present name.
        part_of: The field of this section whose value was for this one too, before it was one of
            its own; empty for none.
        varies: Whether the real default depends on the run file, so that none can be shown.
        asked_again: Values that the default may become on one machine and not on another: commands
            that continue from a stored run take the default instead of them.
        after: For a field that sections inherit: the field of the section that it stands behind;
            empty for the inherited one before.
        written: The type in a run file, where programs may use others; None for the annotation.
        is_set: Whether the order of a list means nothing, so that another order is no change.
    """
    metadata = {
        "resume": resume,
        "holds": holds,
        "formerly": formerly,
        "part_of": part_of,
        "varies": varies,
        "asked_again": asked_again,
        "after": after,
        "written": written,
        "is_set": is_set,
    }
    return dataclasses.field(default=default, metadata=metadata)
