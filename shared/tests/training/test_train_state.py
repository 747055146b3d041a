"""What training changes is saved, and the moving average of what is trained."""

import pytest
import torch
from torch import nn

from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.errors import UserError
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import ADAPTERS, make_model
from ditkit_core.training.checkpoint import load_state, save_state
from ditkit_core.training.config import EMAConfig, SaveConfig
from ditkit_core.training.optim.optimizers import OptimConfig
from ditkit_core.training.train_state import EMA, TrainState
from ditkit_core.training.validation import ValidationResult


def parameters(dtype=torch.float32):
    return {
        "a": nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype)),
        "b": nn.Parameter(torch.zeros(2, 2, dtype=dtype)),
    }


@pytest.mark.parametrize("update_every", [1, 3])
def test_the_average_follows_its_recursion_in_fp32(update_every):
    held = parameters(torch.bfloat16)
    ema = EMA(held, EMAConfig(decay=0.5, update_every=update_every))
    expected = torch.tensor([1.0, 2.0])
    for step in range(1, 30):
        with torch.no_grad():
            held["a"].add_(1)
        ema.update(step)
        if step % update_every:
            continue
        number = step // update_every  # of the update
        keep = min(0.5, (1 + number) / (10 + number))
        expected = keep * expected + (1 - keep) * held["a"].float()
    assert ema.values["a"].dtype is torch.float32
    assert torch.allclose(ema.values["a"], expected)


def test_updates_happen_only_every_so_many_steps():
    held = parameters()
    ema = EMA(held, EMAConfig(decay=0.9, update_every=3))
    changes = []
    for step in range(1, 8):
        with torch.no_grad():
            held["a"].add_(1)
        before = ema.values["a"].clone()
        ema.update(step)
        changes.append(not torch.equal(before, ema.values["a"]))
    assert changes == [False, False, True, False, False, True, False]


def test_swapping_shows_the_average_and_puts_the_weights_back_bitwise():
    held = parameters(torch.bfloat16)
    ema = EMA(held, EMAConfig(decay=0.9))
    with torch.no_grad():
        held["a"].fill_(1 / 3)
    storage = held["a"].data_ptr()
    before = held["a"].detach().clone()
    with pytest.raises(RuntimeError, match="inside"), ema.swap():
        assert torch.equal(held["a"], torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        raise RuntimeError("inside")
    assert torch.equal(held["a"], before) and held["a"].data_ptr() == storage


def test_loading_continues_bitwise():
    once, twice = parameters(), parameters()
    whole, first = EMA(once, EMAConfig(decay=0.99)), EMA(twice, EMAConfig(decay=0.99))
    for step in range(1, 11):
        for held, ema in ((once, whole), (twice, first)):
            with torch.no_grad():
                held["a"].add_(torch.tensor([0.1, -0.3]) * step)
            ema.update(step)
        if step == 5:
            saved = {name: value.clone() for name, value in first.values.items()}
            first = EMA(twice, EMAConfig(decay=0.99))
            first.load(saved)
    assert all(torch.equal(whole.values[name], first.values[name]) for name in once)


def test_without_decay_nothing_is_kept():
    ema = EMA(parameters(), EMAConfig())
    ema.update(1)
    assert ema.values == {}


@pytest.mark.parametrize("fields", [{"decay": 1.0}, {"decay": -0.1}, {"update_every": 0}])
def test_settings_out_of_range_are_refused(fields):
    with pytest.raises(UserError, match=r"ema\.decay"):
        EMAConfig(**fields)


def test_every_number_that_training_changes_is_saved(tmp_path):
    """`test_resume` has weights, average and optimizer; here is what else a run remembers."""

    def state():
        model = make_model(TOY, ToyArch(), adapter=ADAPTERS["lora"])
        return TrainState(model, trainable_parameters(model), OptimConfig(), EMAConfig(decay=0.9))

    def plain(state):
        values = {name: value for name, value in vars(state).items() if not name.startswith("_")}
        numbers = {n: v for n, v in values.items() if v is None or isinstance(v, int | float)}
        return numbers | {"activations": state.first_activations, **state.history.state()}

    saved, loaded = state(), state()
    for number, name in enumerate(plain(saved)):
        if hasattr(saved, name):
            setattr(saved, name, number + 1)
    saved.first_activations = {"0.attention": 3.5}
    saved.history.take(ValidationResult.of({0.5: [1.0, 2.0]}), first=True)
    path = save_state(tmp_path, saved.state_dict(), SaveConfig())
    loaded.load_state_dict(load_state(path), path)
    assert plain(loaded) == plain(saved)
    assert loaded.last_norm and loaded.step and loaded.held_out
