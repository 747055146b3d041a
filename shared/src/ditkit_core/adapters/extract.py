"""Extracts a LoRA from the difference of two complete transformers, with one module in memory at a
time."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from ditkit_core.adapters.files.identify import layers_of, parameters_of
from ditkit_core.adapters.files.write import LoraAdapter, Scaled
from ditkit_core.adapters.products import low_rank
from ditkit_core.errors import UserError
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.spec import ModelSpec
from ditkit_core.weights.fused_tensors import LoraMatrices
from ditkit_core.weights.load import StoredParameters


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """The difference of two transformers."""

    adapters: dict[str, LoraAdapter]
    """Adapters by our name of the module; modules that do not differ have none."""
    energy_shares: dict[str, float]
    """Share of the energy of each module's difference that its adapter keeps, 0 to 1."""
    sizes: dict[str, float]
    """Norm of the difference, by name, of every parameter that differs."""
    uncovered: dict[str, float]
    """For parameters that an adapter cannot change: norm of the difference relative to the base's
    norm, infinite where that is zero."""

    @property
    def residual(self) -> float:
        """Norm of the part of the modules' difference that the adapters do not represent, relative
        to that difference."""
        # By Pythagoras: what is kept is orthogonal to its remainder.
        squares = {name: self.sizes[f"{name}.weight"] ** 2 for name in self.energy_shares}
        lost = sum(square * (1 - self.energy_shares[name]) for name, square in squares.items())
        return (max(0.0, lost) / sum(squares.values())) ** 0.5

    @property
    def share_left(self) -> float:
        """Share of the energy of the total difference in parameters that an adapter cannot change,
        0 to 1."""
        total = sum(size**2 for size in self.sizes.values())
        return sum(self.sizes[name] ** 2 for name in self.uncovered) / total


def extract(
    spec: ModelSpec,
    arch: Any,
    tuned: SafetensorsSource,
    base: SafetensorsSource,
    *,
    rank: int | None,
    energy: float,
    only: Collection[str] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Extracted:
    """Extract LoRAs from the difference of two transformers of one architecture, in any forms and
    dtypes, module by module.

    Args:
        rank: None: in each module the lowest rank, up to 256, that keeps `energy`.
        energy: Share of the squared singular values to keep, above 0 and at most 1.
        only: Modules that may have an adapter; None: all Linear layers.
        advance: Called after each parameter, for progress.
    """
    # Both files are matched to the same names, so they may be in different forms and dtypes.
    shapes = parameters_of(spec.architecture.build, arch)
    stored = [
        StoredParameters.of(source, spec.architecture.names, shapes) for source in (tuned, base)
    ]
    layers = layers_of(spec.architecture.build, arch)
    adapters, energy_shares, sizes, uncovered = {}, {}, {}, {}
    for name in shapes:
        theirs, ours = (parameters.read(name) for parameters in stored)
        size_of_base = float(torch.linalg.vector_norm(ours))
        # in place: memory has at most two matrices of the largest layer
        difference = theirs.sub_(ours)
        size = float(torch.linalg.vector_norm(difference))
        advance()
        if not math.isfinite(size):
            raise UserError(
                f"{tuned.path} or {base.path}: {name} has values that are not finite; fetch it "
                f"again"
            )
        if size == 0:
            continue
        sizes[name], module = size, name.removesuffix(".weight")
        # Biases, norms and modulation: an adapter of Linear layers cannot change them.
        if module not in layers or module == name or (only is not None and module not in only):
            uncovered[name] = size / size_of_base if size_of_base else float("inf")
            continue
        product = low_rank(difference, rank, energy, module)
        adapters[module], energy_shares[module] = (
            Scaled(LoraMatrices(product.down, product.up)),
            product.energy_share,
        )
    if not adapters:
        verdict = "differ in no Linear layer" if sizes else "do not differ"
        raise UserError(
            f"{tuned.path} and {base.path} {verdict}: there is nothing to extract; check --extract "
            f"and --base"
        )
    return Extracted(
        adapters=adapters, energy_shares=energy_shares, sizes=sizes, uncovered=uncovered
    )
