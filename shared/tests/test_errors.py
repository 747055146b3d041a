"""A setting in a message has the name that its reader wrote: a key in a command, an argument in any
other program."""

from collections.abc import Callable

import pytest

from ditkit_core.adapters.config import AdapterConfig, LoraConfig
from ditkit_core.engine.engine import BlockEngine
from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError, argument, keys_shown
from ditkit_core.models.paths import ModelPaths
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model
from ditkit_core.training.config import TrainConfig
from ditkit_core.weights.quantize import check_quantize

CASES: dict[str, tuple[Callable[[], object], str]] = {
    "policy": (
        lambda: BlockEngine(policy="selective"),
        "{train.}checkpointing = 'selective': unknown policy 'selective'; ",
    ),
    "rank": (
        lambda: AdapterConfig(rank=0),
        "{adapter.}rank = 0, {adapter.}alpha = 0.0, {adapter.}dropout = 0.0: set the rank",
    ),
    "r": (lambda: LoraConfig(r=0), "{adapter.}rank = 0, "),
    "split": (
        lambda: place_blocks(make_model(TOY, ToyArch()), ["cpu"], (1,)),  # type: ignore[arg-type,list-item]
        (
            "{train.}split_points = [1] splits over several devices, and {train.}devices names one; "
            "name more"
        ),
    ),
    "steps": (lambda: TrainConfig(steps=-1), "{train.}steps = -1 must be at least 0"),
    "quantize": (
        lambda: check_quantize("int8", "full"),
        "{base.}quantize = int8 stores the base in a form without gradients",
    ),
    "path": (
        lambda: ModelPaths(base="/nowhere/at/all").locate("transformer"),
        "{model.}base = '/nowhere/at/all': there is no such file or folder",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_message_names_the_argument_or_the_key(case: str) -> None:
    fail, expected = CASES[case]
    sections = {"train.", "adapter.", "base.", "model."}
    for shown in (True, False):
        text = expected
        for section in sections:
            text = text.replace("{" + section + "}", section if shown else "")
        with keys_shown(shown), pytest.raises(UserError) as raised:
            fail()
        assert str(raised.value).startswith(text)


def test_the_state_before_a_block_comes_back() -> None:
    with keys_shown(False):
        with keys_shown():
            assert argument("train.steps") == "train.steps"
        assert argument("train.steps") == "steps"
