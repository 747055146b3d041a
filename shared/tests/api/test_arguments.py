"""Arguments of the door that it does not have: what was most likely meant, in one line."""

from collections.abc import Callable
from typing import Any

import pytest

from ditkit_core import LoraConfig, encode, load, plan, sample
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model

SPEC = altered(TOY, presets={"tiny": ToyArch()})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: load(SPEC, "none", checkpoint="full"),
            "load has no argument 'checkpoint'; did you mean checkpointing?",
        ),
        (
            lambda: plan(SPEC, "tiny", "24GiB", checkpointt="full"),
            "plan has no argument 'checkpointt'; did you mean",
        ),
        (
            lambda: plan(SPEC, "tiny", "24GiB", zzz=1),
            "plan has no argument 'zzz'; choose among quantize, compute",
        ),
        (
            lambda: encode(SPEC, "none", "data", "cache", heigth=64),
            "encode has no argument 'heigth'; did you mean height?",
        ),
        (
            lambda: sample(Model(make_model(TOY, ToyArch()), BlockEngine(), TOY), "a cat", step=3),
            "sample has no argument 'step'; did you mean steps?",
        ),
        (
            lambda: LoraConfig(lora_rank=4),
            "LoraConfig has no argument 'lora_rank'; choose among r, lora_alpha",
        ),
        (
            lambda: LoraConfig(target_modules="all-linaer"),
            "target_modules has 'all-linaer'; did you mean all-linear?",
        ),
    ],
)
def test_an_argument_that_is_not_there_is_answered_with_its_neighbour(
    call: Callable[[], Any], said: str
) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert said in str(error.value) and "\n" not in str(error.value)
