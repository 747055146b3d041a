"""Verifies a family's exports with diffusers' transformer; what differs between families is in `DiffusersModel`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ditkit_core.adapters.verify import compare_with_pipeline, share_base
from ditkit_core.adapters.verify_whole import Conversion, compare_whole, load_whole
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.state_dict import StateDictNames


@dataclass(frozen=True, kw_only=True)
class DiffusersModel:
    """diffusers' transformer of a family."""

    names: StateDictNames
    """Our names, with `diffusers` among the forms."""
    inputs: Callable[[Any], Any]
    """From our model to inputs of noise for one tiny sample with all its conditions, on the model's device."""
    empty: Callable[[Any], Any]
    """From our model to diffusers' transformer of its architecture, with parameters on `meta`."""
    dtype_of: Callable[[Any, str, torch.dtype], torch.dtype]
    """From diffusers' transformer, a parameter's name there, and the dtype of our matmuls, to the parameter's dtype there."""
    run: Callable[[Any, Any], Tensor]
    """From diffusers' transformer and inputs to the velocity of the one sample, in fp32 and in our layout."""
    pipeline: Callable[[Any], Any]
    """From diffusers' transformer to a pipeline that has nothing else."""
    convert: Conversion
    """diffusers' conversion of a file with official names."""

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
            pipeline=self.pipeline(theirs),
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
