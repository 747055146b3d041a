"""Verifies a family's exports with diffusers' transformer; what differs between families is in
`DiffusersModel`.

An adapter's file is loaded over our base, and diffusers' output must equal our model's. A whole
transformer's file gives diffusers' model its weights by diffusers' own conversion. Both models read
that file matrix by matrix, so neither is ever in memory. That it has the trained values was checked
when it was written; what is verified here is that another program finds each of them in its place.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ditkit_core.adapters.files.export import base_tensors, method_of_all
from ditkit_core.adapters.files.read import open_adapter
from ditkit_core.adapters.inject import adapter_layers, method_of
from ditkit_core.errors import UserError
from ditkit_core.io.rng import generator
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.meta import on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.nn.factored import PARTS, parts_of
from ditkit_core.nn.parameters import swapped
from ditkit_core.nn.quantized_linear import dense_weight, products_in_dtype, quantized_weights
from ditkit_core.nn.weight_at_use import make_at_use, weights_at_use, without_values
from ditkit_core.weights.factored import first_part
from ditkit_core.weights.fused_tensors import FusedTensors, rows_of
from ditkit_core.weights.load import first_ten

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest relative difference (of norms), by the matmuls' dtype. In fp32, orders of summation
differ. In 16 bits, other programs also round the residual stream and modulation in every block,
which stay fp32 in our model."""


def compare_with_pipeline(
    adapter_file: Path,
    components: ModelPaths,
    model: StagedModel,
    names: StateDictNames,
    *,
    pipeline: Any,
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
) -> str:
    """Load an adapter file into a pipeline of diffusers, and compare the outputs of its transformer
    with ours.

    Args:
        names: The model's names, with `diffusers` among its forms.
        pipeline: A pipeline whose `transformer` has our base weights and no adapter; other
            components may be missing.
        ours: Computes our model's output on inputs of the caller's choice.
        theirs: Computes the output of the pipeline's transformer on the same inputs, in the same
            layout.

    Returns:
        One line about what was compared, and the difference.
    """
    dtype = _matmul_dtype(model)
    with torch.no_grad():
        # Without the adapter first: an adapter that diffusers loads but never applies then shows as
        # no effect.
        bare = theirs()
        method = method_of_all(adapter_layers(model))
        if method == "lora":
            _load(pipeline, adapter_file)
        else:
            _load_factors(pipeline.transformer, adapter_file, model, names)
        _check_modules(pipeline.transformer, model, names, adapter_file)
        loaded = theirs()
        # Our adapter as the file has it: what is compared is the file's meaning, not its rounding,
        # nor the rounding of `base.compute`.
        with rounded_adapter(model, adapter_file), products_in_dtype(model):
            expected = ours()
    effect, difference = relative(loaded, bare), relative(loaded, expected)
    if not difference <= TOLERANCE[dtype]:
        raise UserError(
            f"{adapter_file} over {components.transformer or components.base}: diffusers' output "
            f"differs from ours by {difference:.1e} (at most {TOLERANCE[dtype]:.0e} expected); the "
            "file is not this model's adapter, export it again"
        )
    # A new adapter with B = 0: loading it proves names and shapes, but not values.
    reader = "diffusers loads" if method == "lora" else "diffusers' model with peft's layers takes"
    if effect == 0:
        return f"{reader} {adapter_file.name}, which changes nothing yet, in our model either"
    line = f"{reader} {adapter_file.name} and agrees with our model to {difference:.1e} (the adapter changes {effect:.1e})"
    if effect <= TOLERANCE[dtype]:
        dtype_name = str(dtype).removeprefix("torch.")
        line += f"; {dtype_name} cannot tell so small a change from rounding: only names and shapes are proven"
    return line


def _matmul_dtype(model: StagedModel) -> torch.dtype:
    embed: Any = model.embed
    dtype: torch.dtype = embed.precision.matmul
    return dtype


def share_base(
    transformer: nn.Module,
    model: StagedModel,
    names: StateDictNames,
    form: str,
    dtype_of: Callable[[str], torch.dtype],
) -> None:
    """Give another program's transformer, on `meta`, our base without the adapter, by the names
    that it has in a form.

    This takes no memory: the blocks' matrices are shared, and quantized ones, or those that our
    model reads at each use, are made for each use. So both models multiply with the same numbers,
    even on a device that cannot fit the base.
    """
    base, state = BareBase(model), {}
    for theirs, parts in base.in_form(names, form).items():
        dtype = dtype_of(theirs)
        if (
            any(base.makes(part.name) for part in parts)
            and (layer := linear_of(transformer, theirs)) is not None
        ):
            make_at_use(layer, dtype, partial(base.rows, parts, dtype))
            del layer._parameters["weight"]  # it is no part of the state that is loaded below
        else:
            state[theirs] = base.rows(parts).to(dtype)
    # `assign` shares our tensors; a copy would need the memory of a second base.
    transformer.load_state_dict(state, strict=True, assign=True)


def linear_of(transformer: nn.Module, name: str) -> nn.Linear | None:
    """The Linear layer that has a parameter as its weight; None for any other parameter."""
    owner, _, leaf = name.rpartition(".")
    layer = transformer.get_submodule(owner) if leaf == "weight" else None
    return layer if isinstance(layer, nn.Linear) else None


class BareBase:
    """A model's parameters without its adapter."""

    def __init__(self, model: StagedModel):
        self._quantized, self._at_use = quantized_weights(model), weights_at_use(model)
        self._matmul = _matmul_dtype(model)
        self._tensors = base_tensors(model)

    def makes(self, name: str) -> bool:
        """Whether a parameter is made for each use, and not a tensor that can be shared."""
        return name in self._quantized or name in self._at_use

    def in_form(self, names: StateDictNames, form: str) -> Mapping[str, tuple[TensorSlice, ...]]:
        """The parts of our parameters that make up each tensor's rows, by the form's names."""
        assembly = FusedTensors.of(self._tensors, names.from_native[form])
        assert len(assembly.complete) == len(assembly.parts), "a tensor of the form lacks rows"
        return assembly.complete

    def rows(self, parts: tuple[TensorSlice, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor that consists of these parts."""
        pieces = [rows_of(self._whole(part.name), part.index, part.of) for part in parts]
        # A single piece stays a view, so that `share_base` takes no memory for it.
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return tensor if dtype is None else tensor.to(dtype)

    def _whole(self, name: str) -> Tensor:
        if (layer := self._quantized.get(name)) is not None:
            return dense_weight(layer, self._matmul)
        return self._at_use[name].weight if name in self._at_use else self._tensors[name]


def _load(pipeline: Any, adapter_file: Path) -> None:
    """Load the file as a user would."""
    try:
        with without_values(pipeline.transformer), warnings.catch_warnings():
            # diffusers adds zeros for layers of image tokens, and peft warns that a diffusers
            # file's header does not name them.
            warnings.filterwarnings("ignore", "While injecting the PEFT adapters", RuntimeWarning)
            pipeline.load_lora_weights(str(adapter_file), local_files_only=True)
    except (ValueError, LookupError, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{adapter_file}: diffusers does not load it ({reason}); export it again"
        ) from error
    for name, parameter in pipeline.transformer.named_parameters():
        if "lora_" in name:
            # diffusers would multiply adapters of a 16-bit file in 16 bits; our model always
            # multiplies them in fp32.
            parameter.data = parameter.data.float()


def _load_factors(
    transformer: Any, adapter_file: Path, model: StagedModel, names: StateDictNames
) -> None:
    """Give diffusers' transformer peft's own layers with the factors of a file: diffusers has no
    reader of LoKr and LoHa."""
    import peft

    layers = adapter_layers(model)
    file = open_adapter(
        adapter_file,
        names,
        {name: (layer.out_features, layer.in_features) for name, layer in layers.items()},
    )
    theirs = {}
    for module in layers:
        part, *others = names.from_native["diffusers"](f"{module}.weight")
        if part.of > 1 or others or module not in file.modules:
            raise UserError(
                f"{adapter_file}: {module} is not one layer of diffusers, or not in the file; "
                f"export it again"
            )
        theirs[module] = part.name.removesuffix(".weight")
    config = peft.LoKrConfig if method_of_all(layers) == "lokr" else peft.LoHaConfig
    chosen = "|".join(map(re.escape, theirs.values()))
    peft.inject_adapter_in_model(config(r=1, alpha=1, target_modules=chosen), transformer)
    for module, name in theirs.items():
        layer, factors = transformer.get_submodule(name), file.read_factored(module).parts
        layer.scaling["default"] = file.modules[module].scale
        device = layer.get_base_layer().weight.device
        for kind in PARTS[file.modules[module].method]:
            parameters = (
                {"default": nn.Parameter(factors[kind].to(device))} if kind in factors else {}
            )
            setattr(layer, kind, nn.ParameterDict(parameters))


def _check_modules(
    transformer: Any, model: StagedModel, names: StateDictNames, adapter_file: Path
) -> None:
    """Refuse an adapter with modules that diffusers ignores. It only warns about them, and rounding
    could hide them in the outputs."""
    weights = {
        part.name
        for module in adapter_layers(model)
        for part in names.from_native["diffusers"](f"{module}.weight")
    }
    wanted = {weight.removesuffix(".weight") for weight in weights}
    # It may adapt more modules: where q, k and v are one tensor in the file and only q was trained,
    # k and v get zeros. By peft's layers in diffusers' model: only these have an adapter there.
    if ignored := sorted(wanted - set(adapter_layers(transformer))):
        raise UserError(
            f"{adapter_file}: diffusers ignores the adapter of {first_ten(ignored)}; export it "
            f"again"
        )


def rounded_adapter(model: StagedModel, adapter_file: Path) -> AbstractContextManager[None]:
    """Context in which the model's adapter is rounded like the file's, so that the comparison is
    exact for any dtype of the file."""
    tensors = SafetensorsSource.open(adapter_file).tensors
    (dtype,) = {stored.dtype for key, stored in tensors.items() if not key.endswith(".alpha")}
    folded = not any(key.endswith(".alpha") for key in tensors)
    parameters: dict[str, nn.Parameter] = {}
    values: dict[str, Tensor] = {}
    for module, layer in adapter_layers(model).items():
        if (method := method_of(layer)) != "lora":
            adapter_parts = parts_of(layer, method)
            scaled = first_part(adapter_parts)
        else:
            module_dicts = {
                part: getattr(layer, part) for part in ("lora_A", "lora_B", "lora_magnitude_vector")
            }
            adapter_parts = {
                part: parts["default"].weight
                for part, parts in module_dicts.items()
                if "default" in parts
            }
            # A file without alpha has the scaling folded into B, and B is rounded after that.
            scaled = "lora_B" if folded else ""
        for part, parameter in adapter_parts.items():
            scale = layer.scaling["default"] if part == scaled else 1.0
            parameters[f"{module}.{part}"] = parameter
            values[f"{module}.{part}"] = (parameter.detach().float() * scale).to(
                dtype
            ).float() / scale
    return swapped(parameters, values)


def relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference, relative to the norm of the first; infinite if either is not
    finite."""
    value = float((a - b).norm() / a.norm())
    return float("inf") if math.isnan(value) else value


Conversion = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Another program's: from a file's tensors to its own, by renaming, splitting and joining their
rows."""


class _Rows(NamedTuple):
    """Consecutive rows of a file's tensor."""

    name: str
    start: int
    end: int


def load_whole(
    transformer: nn.Module, folder: Path, convert: Conversion | None
) -> SafetensorsSource:
    """Give another program's transformer, on `meta`, the weights of an exported folder, in fp32;
    matrices of Linear layers are read at each use.

    `convert` is the program's conversion of the file's tensors to its names; None if the file has
    them. Returns the folder's tensors.
    """
    source = SafetensorsSource.open(folder)
    rows_by_name, shapes = _converted(source, convert)
    wanted = {name: tuple(tensor.shape) for name, tensor in transformer.state_dict().items()}
    wrong = sorted(wanted.keys() ^ rows_by_name.keys())
    wrong += [name for name in wanted.keys() & rows_by_name.keys() if shapes[name] != wanted[name]]
    if wrong:
        raise UserError(
            f"{folder}: diffusers' transformer has other names or shapes than it "
            f"({first_ten(wrong)}); export it again"
        )
    state = {}
    for name, rows in rows_by_name.items():
        read = partial(_read, source, rows)
        if (layer := linear_of(transformer, name)) is not None:
            make_at_use(layer, torch.float32, read)
            del layer._parameters["weight"]
        else:
            state[name] = read().view(wanted[name])
    transformer.load_state_dict(state, strict=True, assign=True)
    return source


def compare_whole(
    folder: Path,
    source: SafetensorsSource,
    *,
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
) -> str:
    """Compare the outputs of two programs' transformers with the weights of one folder, on the same
    inputs; returns one line with the difference."""
    with torch.no_grad():
        difference, limit = relative(theirs(), ours()), TOLERANCE[torch.float32]
    if not difference <= limit:
        raise UserError(
            f"{folder}: diffusers' output differs from ours by {difference:.1e} (at most "
            f"{limit:.0e} expected); it is not this model's transformer, export it again"
        )
    return f"diffusers loads {folder.parent.name}/{folder.name} ({len(source.tensors)} tensors) and agrees with our model to {difference:.1e}"


def _converted(
    source: SafetensorsSource, convert: Conversion | None
) -> tuple[dict[str, list[_Rows]], dict[str, tuple[int, ...]]]:
    """The rows of our tensors that make up each tensor of the other program, and its shape.

    Its conversion is run on the numbers of the rows in place of their values: that takes no memory,
    whatever the size of the model.
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
                yield _Rows(
                    names[owner], int(owner_rows[0]) - first, int(owner_rows[-1]) - first + 1
                )

    converted = numbered if convert is None else convert(dict(numbered))
    rows_by_name = {name: list(runs(rows.flatten())) for name, rows in converted.items()}
    # A conversion may make several axes of one.
    return rows_by_name, {
        name: _shape(source, rows_by_name[name]) if rows.ndim == 1 else tuple(rows.shape)
        for name, rows in converted.items()
    }


def _shape(source: SafetensorsSource, rows: list[_Rows]) -> tuple[int, ...]:
    shape = source.tensors[rows[0].name].shape
    return (sum(part.end - part.start for part in rows), *shape[1:]) if shape else shape


def _read(source: SafetensorsSource, rows: list[_Rows]) -> Tensor:
    pieces = []
    for part in rows:
        # a number has no rows
        some = range(part.start, part.end) if source.tensors[part.name].shape else None
        pieces.append(source.read(part.name, rows=some).float())
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
    """From our model to inputs of noise for one tiny sample with all its conditions, on the model's
    device; `noise_inputs` makes it."""
    run: Callable[[Any, Any], Tensor]
    """From diffusers' transformer and inputs to the velocity of the one sample, in fp32 and in our
    layout."""
    dtype_of: Callable[[Any, str, torch.dtype], torch.dtype] = lambda transformer, name, matmul: (
        matmul
    )
    """From diffusers' transformer, a parameter's name there, and the dtype of our matmuls, to the
    parameter's dtype there. By default everything is computed in one."""
    prepare: Callable[[Any, torch.device], object] = lambda transformer, device: None
    """Called with diffusers' transformer and our model's device: makes its tables anew that are no
    parameters, and were made on `meta`."""
    convert: Conversion | None = None
    """diffusers' conversion of a file with official names,
    `lazy("diffusers.loaders.single_file_utils:…")`; None if it needs none."""

    def empty(self, model: Any) -> Any:
        """diffusers' transformer of our model's architecture, with parameters on `meta`."""
        arch = model.embed.arch
        make = resolve_name(f"diffusers:{self.kind(arch)}")
        with on_meta():
            transformer = make(**self.config(arch))
        self.prepare(transformer, _device_of(model))
        return transformer.eval()

    def bare_pipeline(self, transformer: Any) -> Any:
        """A pipeline that has nothing but the transformer."""
        make = resolve_name(f"diffusers:{self.pipeline(transformer)}")
        if issubclass(make, resolve_name("diffusers:ModularPipeline")):
            pipeline = make()  # its parts are given later
            pipeline.update_components(transformer=transformer)
            return pipeline
        parts = list(signature(make).parameters.values())
        return make(
            **{part.name: None for part in parts if part.default is part.empty}
            | {"transformer": transformer}
        )

    def transformer(self, model: Any) -> Any:
        """diffusers' transformer over the tensors of our base, without its adapter.

        Matrices are shared wherever diffusers has them in the same dtype and order. That costs no
        memory, keeps merged adapters, and works for bases in any layout.
        """
        theirs, matmul = self.empty(model), model.embed.precision.matmul
        share_base(
            theirs, model, self.names, "diffusers", lambda name: self.dtype_of(theirs, name, matmul)
        )
        return theirs

    def verify(
        self, adapter_file: Path, components: ModelPaths, model: StagedModel, engine: Engine
    ) -> str:
        """Load an adapter file with diffusers and compare outputs on fixed random inputs:
        `AdapterSpec.verify`.

        An error is raised if diffusers rejects the file or skips a part of it, or if outputs
        differ, as they do if the adapter acts in our model alone.
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
        """Load the folder of a whole transformer as diffusers does, and compare outputs likewise:
        `AdapterSpec.verify_whole`."""
        inputs, theirs = self.inputs(model), self.empty(model)
        source = load_whole(theirs, folder, self.convert if form == "official" else None)
        return compare_whole(
            folder,
            source,
            ours=lambda: engine(model, inputs)[0].float(),
            theirs=lambda: self.run(theirs, inputs),
        )


def _device_of(model: Any) -> torch.device:
    # Not of a parameter that is made at each use, which is on `meta`.
    device: torch.device = next(x.device for x in model.parameters() if not x.is_meta)
    return device


def noise_inputs(
    make_inputs: Callable[..., Any], sizes: Callable[[Any], Mapping[str, Sequence[int]]]
) -> Callable[[Any], Any]:
    """A `DiffusersModel.inputs`: noise at a middle noise level, which is exact in 16 bits and times
    1000.

    Args:
        make_inputs: As `TrainingSpec.make_inputs`.
        sizes: From architecture to the shapes of a training item's tensors. They are tiny, with
            sides that differ, so that swapped axes show.
    """

    def inputs(model: Any) -> Any:
        device = _device_of(model)
        empty = {name: torch.empty(size) for name, size in sizes(model.embed.arch).items()}
        item = noise_item(empty, device)
        return make_inputs([item["latents"]], torch.tensor([0.5], device=device), [item], 1.0)

    return inputs


def noise_item(empty: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A training item of fixed noise for `DiffusersModel.inputs`, in the shapes of
    `TrainingSpec.empty_item`."""
    random = generator("verify export")
    return {
        name: torch.randn(tensor.shape, generator=random).to(device)
        for name, tensor in empty.items()
    }
