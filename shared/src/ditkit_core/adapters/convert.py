"""From adapter to adapter: other names, another rank. What is written is read again, and its products compared, before it gets its name."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ditkit_core.adapters.identify import FoundAdapter, Shapes
from ditkit_core.adapters.read import DIFFUSERS_METADATA, AdapterFile
from ditkit_core.adapters.svd import reduce_product, relative_difference
from ditkit_core.adapters.write import Scaled, write_matrices, zero_adapter
from ditkit_core.errors import UserError
from ditkit_core.models.adapter_formats import ADAPTER_FORMS
from ditkit_core.models.spec import ModelSpec
from ditkit_core.weights.fused_tensors import LoraMatrices
from ditkit_core.weights.load import first_ten

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Largest relative difference of a product (of norms) that rounding to a dtype explains: its epsilon, twice, with room."""

_HASHES = re.compile(r"sshs_|modelspec\.hash|ss_network_(dim|alpha)$|ss_new_vae_hash")
"""Header keys that are of the old file's bytes, rank or scale."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """An adapter file that was written and read again."""

    path: Path
    worst: float
    """The largest relative difference of a module's product to what was to be written: rounding."""
    exact: bool
    """Whether every module says the same to the bit: its matrices, and its scale."""
    ranks: tuple[int, ...]
    """Those of the modules, each once."""


def read_adapter(found: FoundAdapter) -> dict[str, Scaled]:
    """Every module's adapter, in fp32; those that are zeros in both matrices, which fill a form's gaps, are left out.

    Raises:
        UserError: If a value is not finite, naming the modules.
    """
    read = {name: Scaled(found.file.read(name), module.scale) for name, module in found.file.modules.items()}
    if broken := [name for name, adapter in read.items() if not is_finite(adapter)]:
        raise UserError(
            f"{found.path}: values of {len(broken)} of {len(read)} modules are not finite (NaN or infinite): {first_ten(broken)}; "
            "it was damaged in training, take an earlier save"
        )
    # Zeros fill a form's gaps; a file of nothing but zeros is an adapter that was never trained.
    used = {name: adapter for name, adapter in read.items() if adapter.matrices.down.any() or adapter.matrices.up.any()}
    return used or read


def is_finite(adapter: Scaled) -> bool:
    """Whether every value of an adapter, its scale too, is a number."""
    matrices = adapter.matrices
    tensors = (matrices.down, matrices.up, *([] if matrices.magnitude is None else [matrices.magnitude]))
    return math.isfinite(adapter.scale) and all(bool(tensor.isfinite().all()) for tensor in tensors)


def reduce_rank(
    adapters: Mapping[str, Scaled], rank: int | None, energy: float, path: Path
) -> tuple[dict[str, Scaled], dict[str, float]]:
    """The nearest adapters of a lower rank, by singular values of each module's product.

    Args:
        adapters: By our name of the module.
        rank: The rank; modules that have no more are left as they are. None: in each module the least for `energy`.
        energy: Share of the sum of squared singular values that is kept.
        path: The file, for messages.

    Returns:
        The adapters, and the share that each module keeps.

    Raises:
        UserError: If no module has more than this rank, or there are magnitudes.
    """
    largest = max(len(adapter.matrices.down) for adapter in adapters.values())
    if rank is not None and rank >= largest:
        raise UserError(f"--rank {rank}: {path} has rank {largest} at most, and a rank is only made smaller; give less")
    if any(adapter.matrices.magnitude is not None for adapter in adapters.values()):
        raise UserError(
            f"--rank: {path} has DoRA magnitudes, which belong to its whole product; merge it, then --extract"
        )
    smaller, kept = {}, {}
    for name, adapter in adapters.items():
        smaller[name], kept[name] = adapter, 1.0
        if rank is None or len(adapter.matrices.down) > rank:
            found = reduce_product(adapter.matrices.down, adapter.matrices.up, rank=rank, energy=energy)
            smaller[name], kept[name] = replace(adapter, matrices=LoraMatrices(found.down, found.up)), found.kept
    return smaller, kept


def add_missing_modules(
    adapters: Mapping[str, Scaled], spec: ModelSpec, form: str, layers: Shapes, path: Path
) -> dict[str, Scaled]:
    """The adapters with zeros where readers of a form want a module that has none.

    Raises:
        UserError: If the shape of such a layer is not known.
    """
    wanted = [name for name in spec.adapters.rules.fillers(form, list(adapters)) if name not in adapters]
    of_kind = {module_kind(name): (len(a.matrices.up), a.matrices.down.shape[1]) for name, a in adapters.items()}
    shapes = {name: layers.get(name) or of_kind.get(module_kind(name)) for name in wanted}
    if unknown := [name for name, shape in shapes.items() if shape is None]:
        raise UserError(
            f"{path}: readers of the {form} form want all layers of a block, and nothing says how large {first_ten(unknown)} would be; "
            "give --base or model.preset, or choose another form"
        )
    return {**adapters, **{name: zero_adapter(shape) for name, shape in shapes.items() if shape is not None}}


def module_kind(module: str) -> str:
    """A module's name with its block's number left out."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", module, count=1)


def write_converted(
    adapters: Mapping[str, Scaled],
    spec: ModelSpec,
    path: Path,
    *,
    form: str,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
) -> Written:
    """Write adapters in a form, read the file again and compare the product of each module.

    Args:
        adapters: By our name of the module.
        spec: The family.
        path: The file; nothing is there yet.
        form: One of `ADAPTER_FORMS`.
        dtype: Of the matrices.
        metadata: Strings for the header.

    Raises:
        UserError: If the form cannot say the adapter, the file cannot be written, or it says something else.
    """
    spec.adapters.check(form, list(adapters))
    worst: list[float] = [0.0]
    exact: list[bool] = [True]
    if ADAPTER_FORMS[form].alpha:
        metadata = {**metadata, **_network(adapters)}

    def check(file: AdapterFile) -> None:
        for name, adapter in adapters.items():
            if name not in file.modules:  # it shares a tensor with others, and is zero: no column says anything of it
                read, scale = zero_adapter((len(adapter.matrices.up), adapter.matrices.down.shape[1])).matrices, 1.0
            else:
                read, scale = file.read(name), file.modules[name].scale
            difference = relative_difference(
                (adapter.matrices.down, adapter.matrices.up.double() * adapter.scale),
                (read.down, read.up.double() * scale),
            )
            worst[0] = max(worst[0], difference)
            exact[0] = exact[0] and _same_bits(adapter, Scaled(read, scale))
        if not worst[0] <= TOLERANCE[dtype]:
            raise UserError(
                f"{path}: read again, a module's product differs by {worst[0]:.1e} (at most {TOLERANCE[dtype]:.0e} is rounding); "
                "give --dtype fp32"
            )

    write_matrices(path, adapters, spec.architecture.names, form=form, dtype=dtype, metadata=metadata, check=check)
    ranks = tuple(sorted({len(adapter.matrices.down) for adapter in adapters.values()}))
    return Written(path=path, worst=worst[0], exact=exact[0], ranks=ranks)


def _same_bits(one: Scaled, other: Scaled) -> bool:
    """Whether two adapters multiply to the same bits in fp32: the same A, and B times the scale the same numbers, without rounding."""
    if one.matrices.up.shape != other.matrices.up.shape:
        return False
    ups = [adapter.matrices.up.double() * adapter.scale for adapter in (one, other)]
    return torch.equal(one.matrices.down, other.matrices.down) and torch.equal(*ups)


def _network(adapters: Mapping[str, Scaled]) -> dict[str, str]:
    """What kohya's tools show of rank and alpha, where all modules have the same."""
    shapes = {(len(adapter.matrices.down), adapter.scale) for adapter in adapters.values()}
    if len(shapes) > 1:
        return {}
    ((rank, scale),) = shapes
    return {"ss_network_dim": str(rank), "ss_network_alpha": f"{scale * rank:g}"}


def derived_metadata(source: Mapping[str, str], **made: object) -> dict[str, str]:
    """The header of a file that is made from another: what is said there and still true, and how it was made.

    Args:
        source: The other file's header.
        made: What was done, for `made_from`.
    """
    stale = [key for key in source if key in ("format", DIFFUSERS_METADATA) or _HASHES.match(key)]
    kept = {key: value for key, value in source.items() if key not in stale}
    return {**kept, "made_from": json.dumps(made, sort_keys=True)}


def adapter_dtype(found: FoundAdapter) -> torch.dtype:
    """The dtype that holds every matrix of a file: its own, or fp32 where there are several; bf16 of one that is narrower."""
    pieces = [piece for module in found.file.modules.values() for piece in module.pieces if piece is not None]
    keys = [key for piece in pieces for kind, key in piece.adapter.keys.items() if kind != "alpha"]
    dtypes = {found.file.source.tensors[key].dtype for key in keys}
    if len(dtypes) > 1 or not dtypes <= set(TOLERANCE):
        return torch.bfloat16 if all(dtype.itemsize == 1 for dtype in dtypes) else torch.float32
    return dtypes.pop()
