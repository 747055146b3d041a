"""Verifies a family's exports with diffusers' transformer; what differs between families is in `DiffusersModel`.

An adapter's file is loaded over our base (`verify.py`). A whole transformer's file gives diffusers' model its weights by diffusers' own
conversion. Both models read that file matrix by matrix, so neither is ever in memory. That it has the trained values was checked when it was
written; what is verified here is that another program finds each of them in its place.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditkit_core.adapters.verify import TOLERANCE, compare_with_pipeline, linear_of, relative, share_base
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.state_dict import StateDictNames
from ditkit_core.nn.weight_at_use import make_at_use
from ditkit_core.weights.load import first_ten

Conversion = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Another program's: from a file's tensors to its own, by renaming, splitting and joining their rows."""


class _Rows(NamedTuple):
    """Consecutive rows of a file's tensor."""

    name: str
    start: int
    end: int


def load_whole(transformer: nn.Module, folder: Path, convert: Conversion | None) -> SafetensorsSource:
    """Give another program's transformer, on `meta`, the weights of an exported folder, in fp32; matrices of Linear layers are read at each use.

    `convert` is the program's conversion of the file's tensors to its names; None if the file has them. Returns the folder's tensors."""
    source = SafetensorsSource.open(folder)
    rows_by_name = _converted(source, convert)
    wanted = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    wrong = sorted(wanted.keys() ^ rows_by_name.keys())
    wrong += [
        name for name in wanted.keys() & rows_by_name.keys() if _shape(source, rows_by_name[name]) != wanted[name]
    ]
    if wrong:
        raise UserError(
            f"{folder}: diffusers' transformer has other names or shapes than it ({first_ten(wrong)}); export it again"
        )
    state = {}
    for name, rows in rows_by_name.items():
        read = partial(_read, source, rows)
        if (layer := linear_of(transformer, name)) is not None:
            make_at_use(layer, torch.float32, read)
            del layer._parameters["weight"]
        else:
            state[name] = read()
    transformer.load_state_dict(state, strict=True, assign=True)
    return source


def compare_whole(
    folder: Path, source: SafetensorsSource, *, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]
) -> str:
    """Compare the outputs of two programs' transformers with the weights of one folder, on the same inputs; returns one line with the difference."""
    with torch.no_grad():
        difference, limit = relative(theirs(), ours()), TOLERANCE[torch.float32]
    if not difference <= limit:
        raise UserError(
            f"{folder}: diffusers' output differs from ours by {difference:.1e} (at most {limit:.0e} expected); it is not this "
            "model's transformer, export it again"
        )
    return f"diffusers loads {folder.parent.name}/{folder.name} ({len(source.tensors)} tensors) and agrees with our model to {difference:.1e}"


def _converted(source: SafetensorsSource, convert: Conversion | None) -> dict[str, list[_Rows]]:
    """The rows of our tensors that make up each tensor of the other program.

    Its conversion is run on the numbers of the rows in place of their values: that takes no memory, whatever the size of the model.
    """
    numbered, starts, end = {}, {}, 0
    for name, stored in source.tensors.items():
        num_rows = stored.shape[0] if stored.shape else 1
        numbered[name], starts[end] = torch.arange(end, end + num_rows), name
        end += num_rows
    firsts = torch.tensor(list(starts))
    names = list(starts.values())

    def runs(rows: Tensor) -> Iterator[_Rows]:
        breaks = (rows.diff() != 1).nonzero().flatten() + 1
        for run in rows.tensor_split(breaks):
            # A run may go on from the end of one tensor into the next.
            owners = torch.bucketize(run, firsts, right=True) - 1
            for owner in owners.unique().tolist():
                owner_rows, first = run[owners == owner], int(firsts[owner])
                yield _Rows(names[owner], int(owner_rows[0]) - first, int(owner_rows[-1]) - first + 1)

    converted = numbered if convert is None else convert(dict(numbered))
    return {name: list(runs(rows)) for name, rows in converted.items()}


def _shape(source: SafetensorsSource, rows: list[_Rows]) -> tuple[int, ...]:
    shape = source.tensors[rows[0].name].shape
    return (sum(part.end - part.start for part in rows), *shape[1:]) if shape else shape


def _read(source: SafetensorsSource, rows: list[_Rows]) -> Tensor:
    pieces = []
    for part in rows:
        shape, size = source.tensors[part.name].shape, part.end - part.start
        if shape and part.start % size == 0 and shape[0] % size == 0:  # some equal part is read without the others
            piece = source.read(part.name, index=part.start // size, of=shape[0] // size)
        else:
            piece = source.read(part.name)
            piece = piece[part.start : part.end] if shape else piece
        pieces.append(piece.float())
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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

        An error is raised if diffusers rejects the file or skips a part of it, or if outputs differ, as they do if the adapter acts in our model alone."""
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
        """Load the folder of a whole transformer as diffusers does, and compare outputs likewise: `AdapterSpec.verify_whole`."""
        inputs, theirs = self.inputs(model), self.empty(model)
        source = load_whole(theirs, folder, self.convert if form == "official" else None)
        return compare_whole(
            folder,
            source,
            ours=lambda: engine(model, inputs)[0].float(),
            theirs=lambda: self.run(theirs, inputs),
        )


def noise_item(empty: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A training item of fixed noise for `DiffusersModel.inputs`, in the shapes of `TrainingSpec.empty_item`.

    They are tiny, with sides that differ, so that swapped axes show."""
    random = generator("verify export")
    return {name: torch.randn(tensor.shape, generator=random).to(device) for name, tensor in empty.items()}
