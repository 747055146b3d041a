"""The train command of the toy as a program of its own, for the tests of the queue; runs pause
while there is a file `hold` next to their folder.

    python queue_program.py run.toml --queue add
"""

import sys
import time
from pathlib import Path
from typing import Any

from ditkit_core.commands.cli import Family, start


def holding_spec() -> Any:
    """The toy, whose second step and those after it wait while `hold` exists."""
    import torch

    from ditkit_core.testing.specs import altered
    from ditkit_core.testing.toy import TOY, ToyMediaEncoder, ToyTextEncoder

    counted = [0]

    def make_inputs(*rest: Any) -> Any:
        counted[0] += torch.is_grad_enabled()
        while counted[0] > 2 and Path("hold").exists():
            time.sleep(0.05)
        return TOY.training.make_inputs(*rest)

    return altered(
        TOY,
        media_encoder=lambda *_: ToyMediaEncoder(),
        text_encoder=lambda *_: ToyTextEncoder(),
        infer_arch=None,
        make_inputs=make_inputs,
    )


FAMILY = Family(name="toy", presets=("tiny",), demo=Path("no.toml"), spec=holding_spec)

if __name__ == "__main__":
    sys.exit(start(FAMILY, "train"))
