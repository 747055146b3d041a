"""How a configuration field says what may happen to it when a run is resumed.

Configuration is frozen dataclasses, each owned by the module that consumes it; `run/config.py` only composes them. Every
field is declared with `setting`, because a field without a resume rule would silently fork a run.
"""

import dataclasses
from typing import Any, Literal

Resume = Literal["free", "stated", "refused"]

Holds = Literal["value", "path", "part"]
"""What the text of a field is: a value that says all by itself; a path, or `column=path`; a path or the id of a hub."""


def setting(default: Any, *, resume: Resume, holds: Holds = "value", formerly: tuple[str, ...] = ()) -> Any:
    """A dataclass field with a default and a resume rule.

    Args:
        default: The default value; immutable.
        resume: `free` may change between two parts of one run without a word (steps, saving, logging, placement);
            `stated` may change and is logged (learning rate); `refused` would make it another run (data, adapter shape).
        holds: What its text is: of a path only the last part goes into files that are published.
        formerly: Names that it had in this section: stored runs are read under them, and whoever writes one gets the present name.
    """
    return dataclasses.field(default=default, metadata={"resume": resume, "holds": holds, "formerly": formerly})
