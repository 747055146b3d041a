"""Checks for every model that adapters train over a quantized base as over any other: results are
bitwise identical for any policy, split point and device."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.adapters.inject import canonical_name, is_adapter_name
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.placement import place_blocks
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.loading.on_meta import model_on_meta
from ditkit_core.loading.weights import load_weights
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn import quantized_linear
from ditkit_core.nn.quantized_layouts import LAYOUTS, quantized_layout
from ditkit_core.nn.quantized_linear import QuantizedLinear, quantized_weights
from ditkit_core.testing.combinations import every_value
from ditkit_core.testing.live_bytes import LiveBytes
from ditkit_core.testing.pretend_devices import PretendDevices, divide
from ditkit_core.testing.specs import altered
from ditkit_core.testing.world import (
    ADAPTERS,
    DTYPES,
    EVERYWHERE,
    ModelChecks,
    add_adapter,
    differing,
    is_last,
    made_once,
    make_model,
    outcome,
    train_shortly,
)
from ditkit_core.weights.fused_tensors import rows_of
from ditkit_core.weights.quantize import compute_in_8_bits, convert, linears_of_blocks

KINDS = tuple(LAYOUTS)
# Training the base itself is refused.
_ADAPTERS = {name: config for name, config in ADAPTERS.items() if config is not None}
_ONE, _TWO = torch.device("cpu:1"), torch.device("cpu:2")


COMPUTED = ("int8 computed", "fp8 computed")
"""Formats whose codes are also multiplied as they are, as `base.compute` has it."""
OF_FILES = ("nvfp4", "int8_rotated_16 computed")
"""Formats that only files have, one of them multiplied as it is: with scales by blocks, and with a
rotation."""


def make_quantized(
    spec: ModelSpec,
    arch: Any,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    adapter: AdapterConfig | None = None,
) -> Any:
    """`make_model` with a quantized base of the same weights, frozen, and an adapter that does
    something. `kind` may be one of `COMPUTED` or `OF_FILES`.

    `none` is `make_model` itself."""
    if kind == "none":
        return make_model(spec, arch, dtype=dtype, adapter=adapter)
    key = kind, spec.name, arch, dtype, adapter
    return made_once(key, spec, lambda: _make_quantized(spec, arch, kind, dtype, adapter))


def _make_quantized(
    spec: ModelSpec, arch: Any, kind: str, dtype: torch.dtype, adapter: AdapterConfig | None
) -> nn.Module:
    kind, _, computed = kind.partition(" ")
    model: Any = make_model(spec, arch, dtype=dtype).requires_grad_(False)
    values = dict(model.named_parameters())
    for name in convert(model, kind, spec.precision.keep_fp32).quantized:
        layer = model.get_submodule(name)
        layer.set_weight(values[f"{name}.weight"].float().clone())
        if layer.bias is not None:
            layer.bias = values[f"{name}.bias"]
    if computed:
        compute_in_8_bits(model, quantized_layout(kind).product)
        computing = [layer for layer in quantized_weights(model).values() if layer.in_8_bits]
        assert computing, (
            "no layer of `arch` takes products of 8-bit codes: make its sizes multiples of 16"
        )
    if adapter is not None:
        add_adapter(model, spec, adapter, torch.Generator().manual_seed(3))
    return model.train()


class QuantizedChecks(ModelChecks):
    """Inherit, set `spec` and `arch`, define `items`."""

    def _quantized(
        self, kind: str, adapter: str, dtype: str = "fp32", devices: Sequence[torch.device] = ()
    ) -> Any:
        config = (_ADAPTERS | EVERYWHERE)[adapter]
        model = make_quantized(self.spec, self.arch, kind, dtype=DTYPES[dtype], adapter=config)
        if devices:
            divide(model, devices)
        return model

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_blocks_matrices_are_quantized_and_nothing_else(self, kind: str) -> None:
        """Not what stays in fp32, not embedding and head, no adapter; all are, of the sizes that
        this kind can hold."""
        model = self._quantized(kind, "lora everywhere")
        plain = cast(Any, make_model(self.spec, self.arch))
        fits = LAYOUTS[kind].fits
        expected = {
            f"{name}.weight"
            for name in linears_of_blocks(plain)
            if not self.spec.precision.keep_fp32(f"{name}.weight") and fits(*_shape(plain, name))
        }
        assert expected and quantized_weights(model).keys() == expected
        assert not any(
            isinstance(m, QuantizedLinear)
            for stage in (model.embed, model.head)
            for m in stage.modules()
        )
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == is_adapter_name(name), name
            if is_adapter_name(name):
                assert parameter.dtype == torch.float32, name
        names = {
            canonical_name(name)
            for name, _ in model.named_parameters()
            if not is_adapter_name(name)
        }
        assert {name for name, _ in plain.named_parameters()} <= names, (
            "a parameter lost the name that files have"
        )

    @pytest.mark.parametrize(
        ("trained", "kind"),
        every_value(
            list(zip(_ADAPTERS | EVERYWHERE, itertools.cycle(DTYPES), strict=False)),
            (*KINDS, *COMPUTED),
        ),
    )
    def test_no_policy_changes_a_bit_over_a_quantized_base(
        self, trained: tuple[str, str], kind: str
    ) -> None:
        adapter, dtype = trained
        model, items = self._quantized(kind, adapter, dtype), self.items(2, ragged=dtype == "bf16")
        plain = outcome(self.spec, model, items, None)
        assert torch.isfinite(plain.loss) and any(g is not None for g in plain.gradients.values())
        without = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and plain.gradients[name] is None
        ]
        unread = [name for name in without if not name.startswith(self.idle)]
        assert not unread, unread
        for policy in POLICIES:
            assert (
                outcome(self.spec, model, items, BlockEngine(policy=policy)).differences(plain)
                == []
            ), policy

    @pytest.mark.parametrize(
        ("kind", "adapter"),
        [
            # `LeverChecks` has every pair
            pytest.param(*case, marks=() if index == 0 else pytest.mark.exhaustive)
            for index, case in enumerate(zip(itertools.cycle(KINDS), _ADAPTERS, strict=False))
        ],
    )
    def test_no_cut_changes_a_number_over_a_quantized_base(self, kind: str, adapter: str) -> None:
        """A measurement and an optimizer step: on a device that is not the host, and divided over
        two before the middle block."""
        items = self.items(2, ragged=True)
        here = self._quantized(kind, adapter)
        num, policy = len(here.blocks()), POLICIES[KINDS.index(kind)]
        numbers, values = train_shortly(self.spec, here, items, BlockEngine(policy=policy))
        for devices in (
            [_ONE] * (num + 2),
            [_ONE] * (1 + num // 2) + [_TWO] * (num - num // 2 + 1),
        ):
            there = self._quantized(kind, adapter, devices=devices)
            with PretendDevices():
                other_numbers, other_values = train_shortly(
                    self.spec, there, items, BlockEngine(policy=policy)
                )
            assert other_numbers == numbers, devices
            assert differing(other_values, values) == [], devices

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_quantized_base_adds_nothing_to_what_is_kept(self, kind: str) -> None:
        """Bytes alive after a forward without checkpointing are as many as with a dense base: no
        weight is kept dequantized, and codes and scales are the model's own."""
        items = self.items(2, ragged=True)
        dense: Any = make_model(self.spec, self.arch, dtype=torch.bfloat16).requires_grad_(False)
        add_adapter(dense, self.spec, AdapterConfig(rank=4), torch.Generator().manual_seed(3))
        kept_bytes = []
        for model in (dense, self._quantized(kind, "lora", "bf16")):
            with LiveBytes(*model.parameters(), *items) as live:
                inputs = self.inputs(items)
                outputs = BlockEngine()(model, inputs)
                kept_bytes.append(live.total())
            del outputs
        assert kept_bytes[0] == kept_bytes[1]

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_recompute_leaves_out_a_quantized_last_matmul(self, kind: str) -> None:
        """Under `full` it repeats no more matmuls with the base than over a dense one."""
        model = self._quantized(kind, "lora")
        counts = {}
        for policy in ("none", "full"):
            with pytest.MonkeyPatch.context() as patch:
                counts[policy] = count_dequantized(patch)
                outcome(self.spec, model, self.items(2), BlockEngine(policy=policy))
        recomputed = len(counts["full"]) - len(counts["none"])
        most = len(quantized_weights(model)) - self._num_last_matmuls(model)
        assert recomputed <= most, (
            f"dequantizes {recomputed} again, not {most}: does a block save what its last_layers "
            f"return?"
        )

    def test_a_model_written_in_scaled_8_bits_is_read_back_as_it_is(self, tmp_path: Path) -> None:
        """ComfyUI's form: one scale to a tensor of the file, which several of our layers may
        share."""
        spec = altered(self.spec, presets={"this": self.arch})
        model: Any = make_model(spec, self.arch)
        config = ExportConfig(dtype="fp8_scaled", merged=True)
        (folder,) = export_merged(model, spec, tmp_path, config, metadata={})
        (file,) = folder.glob("*.safetensors")
        # The folder of a transformer that ComfyUI reads has no config.json.
        unloaded = model_on_meta(
            spec, ModelPaths(transformer=str(file), preset="this"), AdapterConfig(), BaseConfig(),
            precision=Precision(matmul=torch.float32),
        )  # fmt: skip
        read = load_weights(
            unloaded, placement=place_blocks(unloaded.module, [torch.device("cpu")]), seed=0
        ).module
        quantized, stored = quantized_weights(read), SafetensorsSource.open(file)
        assert quantized.keys() == {
            f"{name}.weight"
            for name in linears_of_blocks(model)
            if not spec.precision.keep_fp32(f"{name}.weight")
        }
        for key in (key for key in stored.tensors if key.endswith(".scale_weight")):
            weight = key.replace("scale_weight", "weight")
            values = stored.read(weight).float() * stored.read(key)
            parts = spec.architecture.names.to_native(weight)
            assert parts
            for part, rows in zip(parts, values.chunk(len(parts)), strict=True):
                assert torch.equal(
                    rows_of(quantized.pop(part.name).dequantize(), part.index, part.of), rows
                ), part
                exact = model.get_parameter(part.name)
                assert (rows - exact).abs().max() <= 2**-4 * values.abs().max()
        assert not quantized, "each is in the file, once"
        for name, parameter in model.named_parameters():
            if "lora_" not in name and name not in quantized_weights(read):
                value = read.state_dict()[
                    name if name in read.state_dict() else _below_base_layer(name)
                ]
                dtype = torch.float32 if spec.precision.keep_fp32(name) else torch.bfloat16
                assert torch.equal(value, parameter.to(dtype).float()), name

    def _num_last_matmuls(self, model: Any) -> int:
        """In how many blocks a quantized matmul comes after everything that a backward needs: one
        of `last_layers`."""
        return sum(
            any(
                is_last(name, block, self.last_layers) and _is_quantized(layer)
                for name, layer in block.named_modules()
            )
            for block in model.blocks()
        )


def _is_quantized(layer: nn.Module) -> bool:
    """Whether a layer, below its adapter if it has one, is quantized."""
    return any(isinstance(module, QuantizedLinear) for module in layer.modules())


def _below_base_layer(name: str) -> str:
    """A parameter's name once its module has an adapter."""
    owner, _, leaf = name.rpartition(".")
    return f"{owner}.base_layer.{leaf}"


def _shape(model: nn.Module, name: str) -> tuple[int, int]:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer.out_features, layer.in_features


def count_dequantized(patch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one with each weight that is dequantized."""
    counted: list[str] = []
    dequantize = quantized_linear._dequantized

    def count(kind: str, *args: Any) -> Tensor:
        counted.append(kind)
        return dequantize(kind, *args)

    patch.setattr(quantized_linear, "_dequantized", count)
    return counted
