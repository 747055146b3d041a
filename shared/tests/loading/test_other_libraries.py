"""A model in the hands of libraries that know torch's modules: pickle, copies, states, peft, and
torch's default collate."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import default_collate

from ditkit_core.adapters.config import AdapterConfig, LoraConfig
from ditkit_core.api.load import load
from ditkit_core.errors import UserError
from ditkit_core.loading.model import Model
from ditkit_core.testing.combinations import every_value
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, official_name, toy_items
from ditkit_core.testing.world import make_model
from ditkit_core.training.micro_batch import flow_loss

SPEC = altered(TOY, presets={"tiny": ToyArch()})
METHODS = {
    "lora": LoraConfig(r=4),
    "dora": LoraConfig(r=4, use_dora=True, lora_dropout=0.1),
    "lokr": AdapterConfig(method="lokr", rank=2),
    "loha": AdapterConfig(method="loha", rank=2),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("toy") / "toy.safetensors"
    state = make_model(TOY, ToyArch()).state_dict()
    save_file({official_name(name): tensor.contiguous() for name, tensor in state.items()}, file)
    return file


def with_values(model: Model) -> Model:
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=random))
    return model


def prediction(model: Model) -> torch.Tensor:
    items, random = toy_items(1), torch.Generator().manual_seed(2)
    noised = [torch.randn(item["latents"].shape, generator=random) for item in items]
    model.module.eval()
    with torch.no_grad():
        return torch.stack(list(model(noised, torch.tensor([0.3]), items)))


@pytest.mark.parametrize(("method", "quantize"), every_value([*METHODS], ["none", "int8", "nf4"]))
def test_a_module_with_an_adapter_is_pickled_and_read_back(
    base: Path, method: str, quantize: Any
) -> None:
    model = with_values(load(SPEC, base, METHODS[method], devices=("cpu",), quantize=quantize))
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    module = torch.load(file, weights_only=False)
    assert torch.equal(prediction(Model(module, model.engine, SPEC)), prediction(model))


def test_a_model_is_copied_and_not_pickled(base: Path) -> None:
    model = with_values(load(SPEC, base, LoraConfig(r=4), devices=("cpu",)))
    other = copy.deepcopy(model)
    assert torch.equal(prediction(other), prediction(model))
    next(other.parameters()).data.zero_()
    assert not torch.equal(prediction(other), prediction(model))
    with pytest.raises(UserError, match="cannot be pickled.*torch.save\\(model.module\\)"):
        pickle.dumps(model)


def test_a_state_is_read_in_place_or_not_at_all(base: Path) -> None:
    model = with_values(load(SPEC, base, LoraConfig(r=4), devices=("cpu",)))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = load(SPEC, base, LoraConfig(r=4), devices=("cpu",))
    parameters = [*other.parameters()]
    before = {name: value.clone() for name, value in other.state_dict().items()}
    last = list(state)[-1]
    for wrong, said in (
        ({name: value for name, value in state.items() if name != last}, "the state lacks"),
        ({**state, "odd": torch.zeros(1)}, "does not train, odd"),
        ({**state, last: torch.zeros(1)}, "in the state and"),
    ):
        with pytest.raises(UserError, match=said):
            other.load_state_dict(wrong)
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    other.load_state_dict(state)
    assert all(one is two for one, two in zip(parameters, other.parameters(), strict=True))
    assert torch.equal(prediction(other), prediction(model))


def test_what_modules_have_is_said_to_be_in_the_module(base: Path) -> None:
    model: Any = load(SPEC, base, devices=("cpu",))
    with pytest.raises(
        AttributeError, match="'modules' \\(it is one of model.module\\).*LoraConfig"
    ):
        model.modules()
    with pytest.raises(AttributeError, match="no attribute 'odd': it is no torch.nn.Module"):
        _ = model.odd
    assert not hasattr(model, "odd")


def test_a_batch_of_the_default_collate_is_named(base: Path) -> None:
    model = load(SPEC, base, LoraConfig(r=4), devices=("cpu",))
    with pytest.raises(UserError, match="default collate.*collate_fn=list"):
        # without the types that tests check
        inspect.unwrap(flow_loss)(model, default_collate(toy_items(1)))


@pytest.mark.slow
def test_the_door_prints_no_warnings_of_libraries(base: Path) -> None:
    code = (
        "import sys; from ditkit_core import LoraConfig, load; from ditkit_core.testing.specs "
        "import altered; "
        "from ditkit_core.testing.toy import TOY, ToyArch; import diffusers; from diffusers import "
        "AutoencoderKL; "
        "load(altered(TOY, presets={'tiny': ToyArch()}), sys.argv[1], LoraConfig(r=4), "
        "devices=('cpu',))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(base)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
