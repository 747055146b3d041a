"""Adds adapter files to a loaded model for samples alone, or runs it with its adapters at another
strength: none of its weights changes, and nothing stays of them afterwards.

The products are added to the output of each layer, whatever it is: quantized, streamed, divided, or
with an adapter that is trained. Merging the files would round the base once more, and a second copy
of it would be needed to take them out bitwise.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditkit_core.adapters.dora import row_factors
from ditkit_core.adapters.files.read import AdapterFile
from ditkit_core.adapters.inject import adapter_layers, trains_magnitude
from ditkit_core.errors import UserError
from ditkit_core.models.protocol import StagedModel
from ditkit_core.nn.factored import Piece, add_products
from ditkit_core.nn.lora import AT_ONCE
from ditkit_core.nn.parameters import switched
from ditkit_core.nn.quantized_linear import QuantizedLinear
from ditkit_core.weights.fused_tensors import LoraMatrices


class AddedAdapter(NamedTuple):
    """An open adapter file that is added at a strength, or was merged into the base at a strength
    and is taken out again."""

    file: AdapterFile
    strength: float
    base_weight: Callable[[str], Tensor] | None = None
    """For a file that is taken out, reads the weight [out, in] of a module that it was merged into,
    in fp32 on the host; None to add it."""

    @property
    def sign(self) -> int:
        """1 if it is added, -1 if it is taken out."""
        return 1 if self.base_weight is None else -1

    def method(self, module: str) -> str:
        """The method of its adapter of a module, as in `adapter.method`, or `dora`; empty if it has
        none."""
        file_module = self.file.modules.get(module)
        return "" if file_module is None else "dora" if file_module.use_dora else file_module.method

    def pieces(self, module: str, device: torch.device) -> list[Piece]:
        """The LoKr or LoHa of a module on a device, in fp32."""
        return [
            Piece(
                {part: tensor.to(device) for part, tensor in matrices.parts.items()},
                scale * self.strength * self.sign,
                matrices.index,
                matrices.of,
            )
            for matrices, scale in self.file.factored(module)
        ]


class AddedLora(nn.Module):
    """A layer, and a low-rank product that is added to its output."""

    def __init__(self, layer: nn.Module, down: Tensor, up: Tensor):
        super().__init__()
        self.layer = layer
        # Neither parameters nor buffers, so that a walk over the model's parameters finds its own
        # alone.
        self._down, self._up = down, up

    def forward(self, x: Tensor) -> Tensor:
        low = x.flatten(0, -2).to(self._down.dtype) @ self._down.T
        out: Tensor = self.layer(x)
        # In place: the widest layer's output is the largest tensor of a block, and nobody else has
        # it yet.
        out.view(-1, out.shape[-1]).addmm_(low.to(out.dtype), self._up.T.to(out.dtype))
        return out


class AddedFactors(nn.Module):
    """A layer, and the product of a LoKr or LoHa that is added to its output."""

    def __init__(self, layer: nn.Module, pieces: Sequence[Piece]):
        super().__init__()
        self.layer, self._pieces = layer, pieces

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        add_products(out, x, self._pieces)
        return out


class Dora(NamedTuple):
    """A DoRA that is added to a layer or taken out of it."""

    matrices: LoraMatrices
    scale: float
    strength: float
    sign: int
    factors: Tensor | None
    """Factors of the rows [out], if the base's weight was read for them; None computes them from
    the layer's own weight."""

    @property
    def from_merged(self) -> Tensor:
        """For an adapter that is taken out, the factor of each row that turns the merged row into
        the base's: 1 / (1 + strength · (f - 1))."""
        assert self.factors is not None
        return 1 / (1 + self.strength * (self.factors - 1))

    def of_rows(self, weight: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """The two parts added to a layer's output: for each row [out] the share of the layer's own
        product, and B of a LoRA [out, rank]."""
        factors = (
            row_factors(weight(), self.matrices, self.scale)
            if self.factors is None
            else self.factors
        )
        up = self.matrices.up * (self.strength * self.scale * factors)[:, None]
        if self.sign > 0:
            return self.strength * (factors - 1), up
        return self.from_merged - 1, up * -self.from_merged[:, None]


class AddedDoras(nn.Module):
    """A layer, and the change of its output by DoRAs over its frozen weight.

    With strength t, a DoRA makes (1 - t) · W + t · f · (W + s·B·A) of a weight W. So the output
    gets t · (f - 1) of the frozen product, and a LoRA's product. Factors are computed in each
    forward, because a streamed or divided weight is on the device only then.
    """

    def __init__(
        self, layer: nn.Module, frozen: nn.Module, doras: Sequence[Dora], *, trained: bool
    ):
        """Add `doras` to a layer with the frozen weight of `frozen`; the output of a `trained`
        layer is not the product of that weight alone."""
        super().__init__()
        self.layer, self._doras, self._trained = layer, doras, trained
        # in a tuple: it is a part of `layer`, and no second child
        self._frozen: tuple[Any] = (frozen,)

    def forward(self, x: Tensor) -> Tensor:
        (frozen,) = self._frozen
        out: Tensor = self.layer(x)
        rows, sums = x.flatten(0, -2), out.view(-1, out.shape[-1])
        is_quantized = isinstance(frozen, QuantizedLinear)
        weight = lambda: frozen.dequantize(x.dtype) if is_quantized else frozen.weight.detach()
        changes = [dora.of_rows(weight) for dora in self._doras]
        share = torch.stack([share for share, _ in changes]).sum(0).to(out.dtype)
        step = max(1, AT_ONCE["cuda"] // sums.shape[1]) if self._trained else len(sums)
        for x_rows, sum_rows in zip(rows.split(step), sums.split(step), strict=True):
            sum_rows.addcmul_(frozen(x_rows) if self._trained else sum_rows, share)
        if frozen.bias is not None:
            sums -= share * frozen.bias
        for dora, (_, up) in zip(self._doras, changes, strict=True):
            low = rows.to(dora.matrices.down.dtype) @ dora.matrices.down.T
            sums.addmm_(low.to(out.dtype), up.T.to(out.dtype))
        return out


@contextmanager
def adapters_added(
    model: nn.Module, adapters: Sequence[AddedAdapter], dtype_of: Callable[[str], torch.dtype]
) -> Iterator[None]:
    """Add adapters that fit a model as long as the context is open; only forwards without gradients
    may run meanwhile.

    `dtype_of` gives the dtype of a base parameter that is not quantized, by name: the products are
    made in it.
    """
    modules = dict.fromkeys(module for adapter in adapters for module in adapter.file.modules)
    before: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for module in modules:
            owner, _, leaf = module.rpartition(".")
            parent, layer = model.get_submodule(owner), model.get_submodule(module)
            module_adapters = [adapter for adapter in adapters if adapter.method(module)]
            has_dora = any(adapter.method(module) == "dora" for adapter in module_adapters)
            if has_dora and "base_layer" in layer._modules and not trains_magnitude(layer):
                # Below the trained adapter, where a layer's output is the frozen product alone.
                parent, leaf, layer = layer, "base_layer", layer.get_submodule("base_layer")
            before.append((parent, leaf, layer))
            setattr(
                parent, leaf, _with(layer, module_adapters, module, dtype_of(f"{module}.weight"))
            )
        yield
    finally:
        for parent, leaf, layer in before:
            setattr(parent, leaf, layer)


def _with(
    layer: nn.Module, adapters: Sequence[AddedAdapter], module: str, dtype: torch.dtype
) -> nn.Module:
    """A layer with adapters of its module: first without what is taken out, so that a DoRA's weight
    is the base's."""
    # The layer's own device: its parameters name it even while a streamed block is on the host.
    device, wrapped = next(layer.parameters()).device, layer
    frozen = layer.get_submodule("base_layer") if trains_magnitude(layer) else layer
    read = next(
        (adapter.base_weight for adapter in adapters if adapter.base_weight is not None), None
    )
    for some in (
        [adapter for adapter in adapters if adapter.sign < 0],
        [adapter for adapter in adapters if adapter.sign > 0],
    ):
        if doras := [
            _opened(adapter, module, read, device, dtype)
            for adapter in some
            if adapter.method(module) == "dora"
        ]:
            wrapped = AddedDoras(wrapped, frozen, doras, trained=frozen is not layer)
        if loras := [adapter for adapter in some if adapter.method(module) == "lora"]:
            wrapped = AddedLora(
                wrapped, *(matrix.to(device, dtype) for matrix in _joined(loras, module))
            )
        for adapter in some:
            if adapter.method(module) not in ("dora", "lora"):
                wrapped = AddedFactors(wrapped, adapter.pieces(module, device))
    return wrapped


def _opened(
    adapter: AddedAdapter,
    module: str,
    base_weight: Callable[[str], Tensor] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Dora:
    """The DoRA of a module on a device. If something is taken out, the base's weight is read for
    the factors of its rows."""
    read, scale = adapter.file.read(module), adapter.file.modules[module].scale
    factors = (
        None if base_weight is None else row_factors(base_weight(module), read, scale).to(device)
    )
    assert read.magnitude is not None
    moved = replace(
        read,
        down=read.down.to(device, dtype),
        up=read.up.to(device, dtype),
        magnitude=read.magnitude.to(device),
    )
    dora = Dora(moved, scale, adapter.strength, adapter.sign, factors)
    if dora.sign < 0 and not bool((dora.from_merged.abs() < 1e3).all()):
        raise UserError(
            f"{adapter.file.source.path} cannot be taken out of {module} again, because it makes "
            "rows of its weight zero; give another strength or another file"
        )
    return dora


def _joined(adapters: Sequence[AddedAdapter], module: str) -> tuple[Tensor, Tensor]:
    """A and B of all LoRAs of a module side by side along the rank, with scales and strengths in
    B."""
    downs, ups = [], []
    for adapter in adapters:
        read = adapter.file.read(module)
        downs.append(read.down)
        ups.append(read.up * (adapter.strength * adapter.sign * adapter.file.modules[module].scale))
    return torch.cat(downs), torch.cat(ups, 1)


def added_bytes(
    adapters: Sequence[AddedAdapter],
    shapes: Mapping[str, tuple[int, ...]],
    dtype_of: Callable[[str], torch.dtype],
    within: Collection[str],
) -> int:
    """Bytes that adapters take while they are added: on the modules of the device (`within`), by
    their weights' shapes [out, in]."""
    stored, changes = 0, [0]
    for adapter in adapters:
        file = adapter.file
        for name, module in file.modules.items():
            if name not in within:
                continue
            if module.method == "lora":
                stored += module.rank * sum(shapes[name]) * dtype_of(f"{name}.weight").itemsize
                if module.use_dora:
                    # Magnitudes and factors; some rows of the weight in fp32, with and without the
                    # product.
                    stored += 2 * 4 * shapes[name][0]
                    changes.append(2 * 4 * min(math.prod(shapes[name]), AT_ONCE["cuda"]))
                continue
            stored += 4 * module.num_factors(file.source)
            # A LoHa's change and the two products that it is made of, for one layer at a time.
            changes.append(3 * 4 * math.prod(shapes[name]) * (module.method == "loha"))
    return stored + max(changes)


class DoraAtStrength(nn.Module):
    """A layer with a DoRA that makes (1 - t) · W + t · W' of a weight W, where the DoRA alone makes
    W' of it. A DoRA divides by the norm of its sum, so no scale of its factors does the same."""

    def __init__(self, layer: nn.Module, strength: float):
        super().__init__()
        self.layer, self._strength = layer, strength

    def forward(self, x: Tensor) -> Tensor:
        # Without the adapter and not the base alone: an assistant next to it stays as it is.
        with switched([self.layer], "_disable_adapters", True):
            without: Tensor = self.layer(x)
        return torch.lerp(without, self.layer(x), self._strength)


@contextmanager
def at_strength(model: nn.Module | StagedModel, strength: float) -> Iterator[None]:
    """Inside the block the model's adapters change its weights by this factor of what they are
    trained to; 1 changes no bit. Only forwards without gradients may run meanwhile."""
    with ExitStack() as stack:
        for name, layer in adapter_layers(model).items() if strength != 1 else ():
            if trains_magnitude(layer):
                owner, _, leaf = name.rpartition(".")
                parent = model.get_submodule(owner)
                setattr(parent, leaf, DoraAtStrength(layer, strength))
                stack.callback(setattr, parent, leaf, layer)
            else:
                scaling: dict[str, Any] = layer.scaling
                stack.callback(scaling.update, default=scaling["default"])
                scaling["default"] *= strength
        yield
