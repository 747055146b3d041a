"""What is said of an exported adapter, with a stand-in for the pipeline that loads it; the packages
have the real ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_base import base_in_form
from torch import nn

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.adapters.diffusers_model import compare_with_pipeline
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.files.start import initial_adapter
from ditkit_core.adapters.files.write import trained_adapters, write_adapter
from ditkit_core.adapters.inject import adapter_layers, initialise, inject, trainable_parameters
from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.testing.toy import TOY, ToyArch, ToyInputs, in_form, toy_items
from ditkit_core.testing.world import make_model

NAMES = StateDictNames.renaming(
    to_native=lambda name: name, from_native={"diffusers": lambda name: name}
)
CONFIG = AdapterConfig(rank=2, alpha=6.0)  # a scale that changes how B is rounded


class Pipeline:
    """Loads files into a toy as diffusers does into its transformers; `spoil` is what it gets
    wrong."""

    def __init__(
        self, spoil: Callable[[Any], None] = lambda transformer: None, targets: tuple[str, ...] = ()
    ):
        self.transformer: Any = make_model(TOY, ToyArch())
        self.spoil, self.targets = spoil, targets

    def load_lora_weights(self, path: str, **options: Any) -> None:
        layers = {
            name: tuple(m.weight.shape)
            for name, m in self.transformer.named_modules()
            if isinstance(m, nn.Linear)
        }
        file = open_adapter(Path(path), NAMES, layers)
        inject(self.transformer, AdapterConfig(rank=2, targets=self.targets), TOY.adapters.targets)
        start = initial_adapter(file, file.modules)
        initialise(self.transformer, 0, device_of=lambda name: torch.device("cpu"), start=start)
        self.spoil(self.transformer)


def verify(
    folder: Path, pipeline: Pipeline, *, size: float = 1.0, dtype: torch.dtype = torch.float32
) -> str:
    model: Any = make_model(TOY, ToyArch(), adapter=CONFIG).eval()
    with torch.no_grad():
        for layer in adapter_layers(model).values():
            layer.lora_B["default"].weight.mul_(size)
    file = folder / "adapter.safetensors"
    adapters = trained_adapters(adapter_layers(model))
    write_adapter(file, adapters, NAMES, form="diffusers", dtype=dtype, metadata={})
    (item,) = toy_items(1)
    inputs = ToyInputs([item["latents"]], torch.tensor([0.5]), [item["text"]])
    before = {name: value.detach().clone() for name, value in trainable_parameters(model).items()}
    line = compare_with_pipeline(
        file, ModelPaths(transformer="toy.safetensors"), model, NAMES, pipeline=pipeline,
        ours=lambda: model(inputs)[0], theirs=lambda: pipeline.transformer.eval()(inputs)[0],
    )  # fmt: skip
    assert all(
        torch.equal(value, trainable_parameters(model)[name]) for name, value in before.items()
    )
    return line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pipeline_with_the_same_output_is_agreed_with(tmp_path: Path, dtype: torch.dtype) -> None:
    line = verify(tmp_path, Pipeline(), dtype=dtype)
    assert (
        line.startswith("diffusers loads adapter.safetensors and agrees with our model to ")
        and "\n" not in line
    )


def test_an_adapter_that_changes_nothing_is_recognised(tmp_path: Path) -> None:
    assert "changes nothing yet" in verify(tmp_path, Pipeline(), size=0.0)


def scaled(transformer: Any) -> None:
    for layer in adapter_layers(transformer).values():
        layer.scaling["default"] *= 1.1


def rejected(transformer: Any) -> None:
    raise ValueError("  keys are unknown: a, b\nand more")


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            Pipeline(scaled),
            "adapter.safetensors over toy.safetensors: diffusers' output differs from ours by",
        ),
        (Pipeline(rejected), r"diffusers does not load it \(keys are unknown: a, b\)"),
    ],
)
def test_another_output_and_a_rejected_file_are_refused(
    tmp_path: Path, pipeline: Pipeline, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        verify(tmp_path, pipeline)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("export it again")


def test_a_module_that_is_left_out_is_named_however_little_it_does(tmp_path: Path) -> None:
    def forget(transformer: Any) -> None:
        transformer.layers[1].query = transformer.layers[1].query.get_base_layer()

    with pytest.raises(
        UserError, match=r"diffusers ignores the adapter of layers\.1\.query; export it again"
    ):
        verify(tmp_path, Pipeline(forget), size=1e-7)


def test_the_base_is_handed_over_in_any_form_and_copied_only_where_it_is_stacked() -> None:
    model: Any = make_model(TOY, ToyArch(), adapter=CONFIG)
    bare: Any = make_model(TOY, ToyArch())
    for form in ("official", "diffusers"):
        found, expected = (
            base_in_form(model, TOY.architecture.names, form),
            in_form(bare.state_dict(), form),
        )
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in found
        )
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    theirs = base_in_form(model, TOY.architecture.names, "diffusers").items()
    copied = {
        name.split(".")[2]
        for name, tensor in theirs
        if tensor.untyped_storage().data_ptr() not in own
    }
    assert copied == {"to_out_query", "to_vk"}
