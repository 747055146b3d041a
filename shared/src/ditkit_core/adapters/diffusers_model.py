"""Verifies a family's exports with diffusers' transformer; what differs between families is in `DiffusersModel`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.verify import compare_with_pipeline, share_base
from ditkit_core.adapters.verify_whole import Conversion, compare_whole, load_whole
from ditkit_core.io.rng import generator
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.state_dict import StateDictNames


@dataclass(frozen=True, kw_only=True)
class DiffusersModel:
    """diffusers' transformer of a family."""

    names: StateDictNames
    """Our names, with `diffusers` among the forms."""
    kind: Callable[[Any], str]
    """From architecture to diffusers' class of its transformer."""
    config: Callable[[Any], Mapping[str, Any]]
    """From architecture to the arguments of that class."""
    pipeline: Callable[[Any], str]
    """From diffusers' transformer to the class of its pipeline."""
    inputs: Callable[[Any], Any]
    """From our model to inputs of noise for one tiny sample with all its conditions, on the model's device; see `noise_item`."""
    run: Callable[[Any, Any], Tensor]
    """From diffusers' transformer and inputs to the velocity of the one sample, in fp32 and in our layout."""
    dtype_of: Callable[[Any, str, torch.dtype], torch.dtype] = lambda transformer, name, matmul: matmul
    """From diffusers' transformer, a parameter's name there, and the dtype of our matmuls, to the parameter's dtype there. By default
    everything is computed in one."""
    prepare: Callable[[Any, torch.device], object] = lambda transformer, device: None
    """Called with diffusers' transformer and our model's device: makes its tables anew that are no parameters, and were made on `meta`."""
    convert: Conversion | None = None
    """diffusers' conversion of a file with official names, `lazy("diffusers.loaders.single_file_utils:…")`; None if it needs none."""

    def empty(self, model: Any) -> Any:
        """diffusers' transformer of our model's architecture, with parameters on `meta`."""
        arch = model.embed.arch
        make = resolve_name(f"diffusers:{self.kind(arch)}")
        with torch.device("meta"):
            transformer = make(**self.config(arch))
        self.prepare(transformer, next(model.embed.parameters()).device)
        return transformer.eval()

    def bare_pipeline(self, transformer: Any) -> Any:
        """A pipeline that has nothing but the transformer."""
        make = resolve_name(f"diffusers:{self.pipeline(transformer)}")
        parts = list(signature(make).parameters.values())
        return make(**{part.name: None for part in parts if part.default is part.empty} | {"transformer": transformer})

    def transformer(self, model: Any) -> Any:
        """diffusers' transformer over the tensors of our base, without its adapter.

        Matrices are shared wherever diffusers has them in the same dtype and order. That costs no memory, keeps merged adapters, and works
        for bases in any layout.
        """
        theirs, matmul = self.empty(model), model.embed.precision.matmul
        share_base(theirs, model, self.names, "diffusers", lambda name: self.dtype_of(theirs, name, matmul))
        return theirs

    def verify(self, adapter_file: Path, components: ModelPaths, model: StagedModel, engine: Engine) -> str:
        """Load an adapter file with diffusers and compare outputs on fixed random inputs: `AdapterSpec.verify`.

        Raises:
            UserError: If diffusers rejects the file or skips a part of it, or the outputs differ. They also differ if the adapter has an
                effect in our model alone.
        """
        inputs, theirs = self.inputs(model), self.transformer(model)
        return compare_with_pipeline(
            adapter_file,
            components,
            model,
            self.names,
            pipeline=self.bare_pipeline(theirs),
            ours=lambda: engine(model, inputs)[0].float(),
            theirs=lambda: self.run(theirs, inputs),
        )

    def verify_whole(self, folder: Path, form: str, model: StagedModel, engine: Engine) -> str:
        """Load the folder of a whole transformer as diffusers does, and compare outputs likewise: `AdapterSpec.verify_whole`.

        Raises:
            UserError: If names or shapes do not fit diffusers' model, or the outputs differ.
        """
        inputs, theirs = self.inputs(model), self.empty(model)
        source = load_whole(theirs, folder, self.convert if form == "official" else None)
        return compare_whole(
            folder,
            source,
            ours=lambda: engine(model, inputs)[0].float(),
            theirs=lambda: self.run(theirs, inputs),
        )


def noise_item(empty: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A training item of fixed noise for `DiffusersModel.inputs`.

    Args:
        empty: An item that says the shapes, as `TrainingSpec.empty_item` makes it; tiny, with sides that differ, so that swapped axes show.
        device: Where the noise goes.
    """
    random = generator("verify export")
    return {name: torch.randn(tensor.shape, generator=random).to(device) for name, tensor in empty.items()}
