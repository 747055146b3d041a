"""An exported adapter is proven by diffusers: the right one passes, a wrong one does not."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import export_adapter
from ditkit_core.adapters.inject import trainable_parameters
from ditkit_core.engine.placement import place_blocks
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision, parse_dtype
from ditkit_core.models.protocol import run_plain
from ditkit_wan.spec import WAN
from ditkit_wan.verify import DIFFUSERS

FEW = ("self_attn.q", "cross_attn.v", "ffn.2")


class World:
    """A model with a trained adapter, and its export."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        *,
        size: float = 0.5,
        dtype: str = "fp32",
        form: str = "official",
        quantize: Literal["none", "int8", "fp8", "nf4"] = "none",
        **config: Any,
    ):
        self.components = ModelPaths(base=str(checkpoint), dtype=dtype)
        precision = Precision(matmul=parse_dtype(dtype))
        base = BaseConfig(quantize=quantize)
        unloaded = model_on_meta(
            WAN, self.components, AdapterConfig(**{"rank": 4, **config}), base, precision=precision
        )
        self.model = load_weights(
            unloaded, placement=place_blocks(unloaded.module, [torch.device("cpu")]), seed=0
        ).module
        self.folder, self.form = folder, form
        with torch.no_grad():
            for name, parameter in trainable_parameters(self.model).items():
                if not parameter.any():
                    parameter.copy_(
                        size * torch.randn(parameter.shape, generator=generator("up", name)) / 2
                    )

    def export(self, **config: Any) -> Path:
        (file,) = export_adapter(
            self.model,
            WAN,
            self.folder,
            "adapter",
            ExportConfig(forms=(self.form,), **config),
            metadata={},
        )
        return file

    def verify(self, file: Path) -> str:
        return DIFFUSERS.verify(file, self.components, self.model, run_plain)

    def adapter_values(self) -> dict[str, torch.Tensor]:
        return {
            name: p.detach().clone() for name, p in self.model.named_parameters() if "lora_" in name
        }


def test_an_exported_adapter_is_what_diffusers_computes(checkpoint: Path, tmp_path: Path) -> None:
    world = World(checkpoint, tmp_path, alpha=6.0)
    before = world.adapter_values()
    for dtype in ("fp32", "bf16"):
        line = world.verify(world.export(dtype=dtype))
        assert "agrees with our model" in line and "cannot tell" not in line and "\n" not in line
        after = world.adapter_values()
        assert all(torch.equal(before[name], value) for name, value in after.items()), dtype


def test_dora_in_diffusers_form_is_proven_too(checkpoint: Path, tmp_path: Path) -> None:
    world = World(checkpoint, tmp_path, form="diffusers", use_dora=True, targets=FEW)
    assert "agrees with our model" in world.verify(world.export(dtype="fp32"))


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({"method": "lokr", "alpha": 6.0, "targets": FEW}, "official"),
        ({"method": "lokr", "rank": 2, "decompose_factor": 4, "decompose_both": True}, "musubi"),
        ({"method": "loha", "alpha": 6.0, "quantize": "nf4", "targets": FEW}, "diffusers"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["method"],
)
def test_a_lokr_or_loha_is_compared_with_pefts_layers_in_diffusers_model(
    checkpoint: Path, tmp_path: Path, config: dict[str, Any], form: str
) -> None:
    world = World(checkpoint, tmp_path, form=form, **config)
    line = world.verify(file := world.export(dtype="fp32"))
    assert (
        "diffusers' model with peft's layers takes adapter" in line
        and "agrees with our model" in line
    ), line
    state = load_file(file)
    key = next(
        key
        for key in state
        if key.endswith(
            ("ffn.2.lokr_w2_a", "ffn_2.lokr_w2", "ffn.net.2.hada_w2_a", "ffn_2.lokr_w2_a")
        )
    )
    state[key] = state[key] * 1.5
    save_file(state, file)
    with pytest.raises(UserError, match="differs from ours"):
        world.verify(file)


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_over_a_quantized_base_diffusers_multiplies_with_the_same_weights(
    checkpoint: Path, tmp_path: Path, quantize: Any
) -> None:
    """Within fp32's tolerance: the rounding of the base is no part of the difference."""
    world = World(
        checkpoint,
        tmp_path,
        quantize=quantize,
        use_dora=quantize == "nf4",
        form="diffusers",
        targets=FEW,
    )
    assert "agrees with our model" in world.verify(world.export(dtype="fp32"))


def test_a_bf16_base_is_compared_within_its_rounding(checkpoint: Path, tmp_path: Path) -> None:
    world = World(checkpoint, tmp_path, dtype="bf16")
    assert "cannot tell" not in world.verify(world.export())
    small = World(checkpoint, tmp_path, dtype="bf16", size=1e-3)
    assert "bfloat16 cannot tell so small a change" in small.verify(small.export())


def tamper(file: Path, change: str) -> None:
    state = load_file(file)
    key = next(key for key in state if key.endswith("blocks.1.ffn.2.lora_B.weight"))
    if change == "value":
        state[key] = state[key] * 1.5
    elif change == "missing":
        del state[key], state[key.replace("lora_B", "lora_A")]
    elif change == "unknown module":
        for part in ("lora_A", "lora_B"):
            state[key.replace("lora_B", part).replace("ffn.2", "ffn.7")] = state[
                key.replace("lora_B", part)
            ].clone()
    elif change == "empty":
        state = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    save_file(state, file)


def test_a_tampered_adapter_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    world = World(checkpoint, tmp_path)
    file = world.export(dtype="fp32")
    exported = file.read_bytes()
    for change in ("value", "missing", "unknown module", "empty"):
        file.write_bytes(exported)
        tamper(file, change)
        with pytest.raises(UserError, match="adapter.safetensors") as caught:
            world.verify(file)
        refused = str(caught.value)
        assert "\n" not in refused and "export it again" in refused, change


def test_an_adapter_without_effect_is_recognised(checkpoint: Path, tmp_path: Path) -> None:
    world = World(checkpoint, tmp_path, size=0.0)
    assert "changes nothing yet" in world.verify(world.export(dtype="fp32"))
