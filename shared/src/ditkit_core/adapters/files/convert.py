"""Converts adapters to other names or another rank. Each file is read again and compared before it
gets its name."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.files.alpha import DIFFUSERS_METADATA
from ditkit_core.adapters.files.identify import FoundAdapter, Shapes
from ditkit_core.adapters.files.read import AdapterFile, FileModule, refuse_damaged
from ditkit_core.adapters.files.write import LoraAdapter, Scaled, write_adapter, zero_adapter
from ditkit_core.adapters.products import reduce_product, relative_difference
from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import ADAPTER_FORMS, VERIFIED
from ditkit_core.models.spec import ModelSpec
from ditkit_core.weights.factored import METHOD_OF_PART
from ditkit_core.weights.fused_tensors import LoraMatrices
from ditkit_core.weights.load import first_ten

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative difference of a product (of norms) that rounding to a dtype explains: twice its
epsilon, with a margin."""

_HASHES = re.compile(r"sshs_|modelspec\.hash|ss_network_(dim|alpha)$|ss_new_vae_hash")
"""Header keys that depend on the old file's bytes, rank or scale."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """An adapter file that was written and read again."""

    path: Path
    worst: float
    """The largest relative difference from what was intended, caused by rounding: of a LoRA's
    product, or of a tensor of a LoKr or LoHa."""
    exact: bool
    """Whether every module is bitwise identical: its matrices and its scale."""
    ranks: tuple[int, ...]
    method: str = "lora"


def read_adapters(file: AdapterFile) -> dict[str, Scaled[Any]]:
    """Read every module's adapter in fp32. LoRAs with zeros in both matrices, which fill a form's
    gaps, are left out."""
    path, modules = file.source.path, file.modules
    factored = [name for name, module in modules.items() if module.method != "lora"]
    if factored and len(factored) < len(modules):
        raise UserError(f"{path} mixes LoKr or LoHa ({factored[0]}) with LoRA; merge it")
    read: dict[str, Scaled[Any]] = {
        name: Scaled(file.read_factored(name) if factored else file.read(name), module.scale)
        for name, module in modules.items()
    }
    if shared := [name for name in factored if read[name].matrices.of > 1]:
        raise UserError(
            f"{path}: {shared[0]} shares its factors with other layers, which no other form can "
            f"represent; merge it"
        )
    refuse_damaged(path, ((name, _tensors(adapter)) for name, adapter in read.items()))
    if factored:
        return read
    # Zeros fill a form's gaps; a file of nothing but zeros is an adapter that was never trained.
    # Only if both matrices are zero: a new adapter has B = 0 and a random A, and is worth keeping.
    used = {
        name: adapter
        for name, adapter in read.items()
        if adapter.matrices.down.any() or adapter.matrices.up.any()
    }
    return used or read


def check_finite(adapter: FoundAdapter) -> None:
    """Refuse a file with values that are not finite, in which LoRA may be mixed with LoKr or
    LoHa."""
    file = adapter.file

    def tensors(name: str, module: FileModule) -> Sequence[Tensor]:
        return (
            _tensors(Scaled(file.read(name), module.scale))
            if module.method == "lora"
            else (file.change_of(name),)
        )

    refuse_damaged(
        adapter.path, ((name, tensors(name, module)) for name, module in file.modules.items())
    )


def _tensors(adapter: Scaled[Any]) -> Sequence[Tensor]:
    return (*adapter.matrices.parts.values(), torch.tensor(adapter.scale))


def reduce_rank(
    adapters: Mapping[str, LoraAdapter], rank: int | None, energy: float, path: Path
) -> tuple[dict[str, LoraAdapter], dict[str, float]]:
    """The nearest adapters of a lower rank, by the singular values of each module's product, and
    the share of it that each module keeps.

    Args:
        rank: Modules of this rank or less stay as they are. None: the lowest rank per module that
            keeps `energy`.
        energy: Share of the sum of squared singular values to keep, above 0 and at most 1.
    """
    largest = max(len(adapter.matrices.down) for adapter in adapters.values())
    if rank is not None and rank >= largest:
        raise UserError(
            f"--rank {rank}: {path} has rank {largest} at most, and a rank can only be reduced; "
            f"give a lower one"
        )
    if any(adapter.matrices.magnitude is not None for adapter in adapters.values()):
        raise UserError(
            f"--rank: {path} has DoRA magnitudes, which belong to its complete product; merge it, "
            f"then --extract"
        )
    smaller, energy_shares = {}, {}
    for name, adapter in adapters.items():
        # A module of a lower rank than the wanted one stays as it is: no rank is ever raised.
        smaller[name], energy_shares[name] = adapter, 1.0
        if rank is None or len(adapter.matrices.down) > rank:
            product = reduce_product(
                adapter.matrices.down, adapter.matrices.up, rank=rank, energy=energy
            )
            smaller[name], energy_shares[name] = (
                replace(adapter, matrices=LoraMatrices(product.down, product.up)),
                product.energy_share,
            )
    return smaller, energy_shares


def add_missing_modules(
    adapters: Mapping[str, LoraAdapter], spec: ModelSpec, form: str, layers: Shapes, path: Path
) -> dict[str, LoraAdapter]:
    """Add zeros for modules without an adapter that readers of a form require; `layers` has the
    shapes that are known of layers."""
    wanted = [
        name for name in spec.adapters.rules.fillers(form, list(adapters)) if name not in adapters
    ]
    # Layers of one kind have one shape in all blocks, so an adapter of one block gives the shape
    # for another.
    shape_by_kind = {
        module_kind(name): (len(a.matrices.up), a.matrices.down.shape[1])
        for name, a in adapters.items()
    }
    shapes = {name: layers.get(name) or shape_by_kind.get(module_kind(name)) for name in wanted}
    if unknown := [name for name, shape in shapes.items() if shape is None]:
        raise UserError(
            f"{path}: readers of the {form} form need all layers of a block, and the shapes of "
            f"{first_ten(unknown)} are unknown; give --base or model.preset, or choose another form"
        )
    return {
        **adapters,
        **{name: zero_adapter(shape) for name, shape in shapes.items() if shape is not None},
    }


def module_kind(module: str) -> str:
    """A module's name with `*` for its block's number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", module, count=1)


def write_converted(
    adapters: Mapping[str, Scaled[Any]],
    spec: ModelSpec,
    path: Path,
    *,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> Written:
    """Write adapters in a form and a dtype, read the file again and compare each module: of a LoRA
    its product, of a LoKr or LoHa its tensors."""
    # Before anything is written: readers of this form may ignore or misread some modules.
    spec.adapters.check(form, list(adapters))
    if factored := [
        part
        for adapter in adapters.values()
        for part in adapter.matrices.parts
        if part in METHOD_OF_PART
    ]:
        write_adapter(
            path, adapters, spec.architecture.names, form=form, dtype=dtype, metadata=metadata
        )
        worst = _largest_rounding(adapters, dtype)
        return Written(
            path=path, worst=worst, exact=not worst, ranks=(), method=METHOD_OF_PART[factored[0]]
        )
    differences: list[float] = []
    exact: list[bool] = []
    # kohya's header keys, for the forms that kohya's tools read.
    if ADAPTER_FORMS[form].scale == "alpha":
        metadata = {**metadata, **_network(adapters)}

    def check(file: AdapterFile) -> None:
        for name, adapter in adapters.items():
            if name not in file.modules:
                # It shares a tensor with others and is zero, so that no column of that tensor
                # belongs to it.
                read, scale = zero_adapter(adapter.matrices.shape).matrices, 1.0
            else:
                read, scale = file.read(name), file.modules[name].scale
            difference = relative_difference(
                (adapter.matrices.down, adapter.matrices.up.double() * adapter.scale),
                (read.down, read.up.double() * scale),
            )
            differences.append(difference)
            exact.append(_same_bits(adapter, Scaled(read, scale)))
        if not max(differences) <= TOLERANCE[dtype]:
            raise UserError(
                f"{path}: after reading it again, a module's product differs by "
                f"{max(differences):.1e} (rounding explains {TOLERANCE[dtype]:.0e}); "
                "give --dtype fp32"
            )

    write_adapter(
        path,
        adapters,
        spec.architecture.names,
        form=form,
        dtype=dtype,
        metadata=metadata,
        check=check,
    )
    ranks = tuple(sorted({adapter.matrices.rank for adapter in adapters.values()}))
    return Written(path=path, worst=max(differences), exact=all(exact), ranks=ranks)


def _largest_rounding(adapters: Mapping[str, Scaled[Any]], dtype: torch.dtype) -> float:
    """The largest relative difference of a tensor of a LoKr or LoHa, by norm, that rounding to a
    file's dtype causes."""
    tensors = [
        tensor
        for one in adapters.values()
        for tensor in one.matrices.scaled(one.scale).parts.values()
    ]
    norms = [
        (torch.linalg.vector_norm(one), torch.linalg.vector_norm(one - one.to(dtype).float()))
        for one in tensors
    ]
    return max((float(difference) / float(size) for size, difference in norms if size), default=0.0)


def _same_bits(one: LoraAdapter, other: LoraAdapter) -> bool:
    """Whether two adapters have bitwise identical products: the same A, and the same B times scale
    without rounding."""
    if one.matrices.up.shape != other.matrices.up.shape:
        return False
    # In fp64: a form may have moved the scale into B, and fp32 would round the product.
    ups = [adapter.matrices.up.double() * adapter.scale for adapter in (one, other)]
    return torch.equal(one.matrices.down, other.matrices.down) and torch.equal(*ups)


def _network(adapters: Mapping[str, LoraAdapter]) -> dict[str, str]:
    """Header keys for kohya's tools, which show rank and alpha; empty where modules differ."""
    shapes = {(len(adapter.matrices.down), adapter.scale) for adapter in adapters.values()}
    if len(shapes) > 1:
        return {}
    ((rank, scale),) = shapes
    return {"ss_network_dim": str(rank), "ss_network_alpha": f"{scale * rank:g}"}


def derived_metadata(source: Mapping[str, str], **origin: object) -> dict[str, str]:
    """The header of a file that is made from another: what is still true of the other's header, and
    how it was made (`origin`, for `made_from`)."""
    stale = [
        key
        for key in source
        if key in ("format", DIFFUSERS_METADATA, VERIFIED) or _HASHES.match(key)
    ]
    remaining = {key: value for key, value in source.items() if key not in stale}
    return {**remaining, "made_from": json.dumps(origin, sort_keys=True)}


def adapter_dtype(adapter: FoundAdapter) -> torch.dtype:
    """A dtype for every matrix of a file: the file's own, fp32 if it has several, bf16 if they are
    narrower than 16 bits."""
    pieces = [
        piece
        for module in adapter.file.modules.values()
        for piece in module.pieces
        if piece is not None
    ]
    keys = [key for piece in pieces for kind, key in piece.adapter.keys.items() if kind != "alpha"]
    dtypes = {adapter.file.source.tensors[key].dtype for key in keys}
    if len(dtypes) > 1 or not dtypes <= set(TOLERANCE):
        return torch.bfloat16 if all(dtype.itemsize == 1 for dtype in dtypes) else torch.float32
    return dtypes.pop()
