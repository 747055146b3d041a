"""The handle of a model: its modules on their devices, the engine that runs it, and what is trained
of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.adapters.config import AdapterConfig, BaseConfig, ExportConfig
from ditkit_core.adapters.files.export import check_export, export_adapter, with_forms_of
from ditkit_core.adapters.files.identify import layers_of
from ditkit_core.adapters.files.read import AdapterFile, open_adapter
from ditkit_core.adapters.files.start import config_from_file, initial_adapter
from ditkit_core.adapters.inject import (
    adapter_layers,
    canonical_name,
    initialise,
    inject,
    is_adapter_name,
    trainable_parameters,
)
from ditkit_core.engine.block_swap import BlockSwap
from ditkit_core.errors import UserError
from ditkit_core.io.files import local_path
from ditkit_core.io.runtimes import sent_to
from ditkit_core.loading.architecture import config_json_of
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision, dtype_name, precision_of
from ditkit_core.models.protocol import Engine, StagedModel
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.quantized_linear import quantized_weights
from ditkit_core.weights.load import StoredParameters

if TYPE_CHECKING:
    from ditkit_core.distributed.shards import Shards


@dataclass(frozen=True, kw_only=True)
class ModelOrigin:
    """The files that a model comes from, and what they and the settings for them decided."""

    paths: ModelPaths
    """Of all components of the model."""
    arch: Any
    preset: str
    """Name of the architecture; empty if a config.json describes it and it matches no preset."""
    trained: AdapterConfig | None
    """What is trained, with the settings that an `adapter.init` file decided; None for a frozen
    model."""
    precision: Precision
    stored: StoredParameters
    """The base's parameters in its files, with merged adapters."""
    merged: list[tuple[AdapterFile, float]]
    assistant: tuple[AdapterFile, float] | None
    """The assistant of the layers that it is not merged into, because their DoRA is trained."""
    start: Callable[[str], Mapping[str, Tensor]] | None
    """Initial values of a module's adapter, if a file contains them."""
    base: BaseConfig
    merge_key: str
    """As `BaseConfig.merge_key`, for errors."""

    @property
    def adapter(self) -> AdapterConfig:
        """What is trained, of a model that is not frozen."""
        assert self.trained is not None, "nothing is trained"
        return self.trained


@dataclass(eq=False, repr=False)
class Model:
    """A staged model with the engine that runs it, on `meta` or on its devices.

    `load` makes one from files: on `meta` first (`on_meta.py`), where it is matched with them and
    gets its adapters; then its weights are read in place (`weights.py`). Any staged module with an
    engine and its family's spec is one as well. `engine` may be replaced at any time, by one with
    another checkpointing policy, for example.

        prediction = model(noised, sigma, items)
    """

    module: StagedModel
    engine: Engine
    spec: ModelSpec
    trainable: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """The parameters to train, by canonical name; no two names share one. A forward alone needs
    none."""
    streamer: BlockSwap | None = None
    """Streams weights of the model through its devices, for the engine; None if all stay there."""
    shards: "Shards | None" = None
    """Divides the weights over ranks; None if this rank has all of them. `trainable` are then this
    rank's rows."""
    loaded_from: ModelOrigin | None = field(default=None, kw_only=True)
    """The files that it comes from; None for a module that was built otherwise."""

    def __call__(
        self,
        noised: Sequence[Float[Tensor, "..."]],
        sigma: Float[Tensor, " batch"],
        items: Sequence[Mapping[str, Tensor]],
        guidance: float = 1.0,
    ) -> Sequence[Float[Tensor, "..."]]:
        """Predict the velocity, from data to noise, of some samples.

        Args:
            noised: Latents of each sample at its noise level, fp32; tensors may be on any device.
            sigma: Noise level of each sample, 0 for data and 1 for noise, fp32.
            items: The samples' training items, for the text and all else that the model is
                conditioned on.
            guidance: Input of a model with a guidance embedding; other models ignore it.

        Returns:
            Velocities with the shapes of the latents, on the device of the head.
        """
        device = self.device
        there = [{name: sent_to(tensor, device) for name, tensor in item.items()} for item in items]
        latents = [sent_to(sample, device) for sample in noised]
        return self.predict(
            self.spec.training.make_inputs(latents, sent_to(sigma, device), there, guidance)
        )

    def predict(self, inputs: Any) -> Any:
        """The module's prediction for what the family's `make_inputs` returned."""
        return self.module(inputs, engine=self.engine)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The trained parameters, for an optimizer; DTensors where ranks divide them."""
        return iter(
            self.trainable.values() if self.shards is None else self.shards.trained.values()
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The trained parameters by canonical name, without a gradient; they share the model's
        memory."""
        named = self.trainable if self.shards is None else self.shards.trained
        return {name: parameter.detach() for name, parameter in named.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Read what `state_dict` returned, in place: an optimizer's parameters stay those that it
        has.

        Raises:
            UserError: If names or shapes differ from the trained parameters; then nothing has
                changed.
        """
        if self.streamer is not None and not self.adapts:
            self._check_undivided("load_state_dict(state)", "swap_blocks")
        named = self.trainable if self.shards is None else self.shards.trained
        if differing := sorted(named.keys() ^ state.keys()):
            lacks = "lacks" if differing[0] in named else "has, and the model does not train,"
            raise UserError(
                f"the state {lacks} {differing[0]} ({len(differing)} such names); load the model "
                f"with the same adapter"
            )
        for name, parameter in named.items():
            if state[name].shape != parameter.shape:
                shapes = (
                    f"{[*state[name].shape]} in the state and {[*parameter.shape]} in the model"
                )
                raise UserError(f"{name} is {shapes}; load the model with the same adapter")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(state[name])

    if not TYPE_CHECKING:  # mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Say where the attributes of a torch module are: libraries such as peft ask for
            them."""
            # A handle, so that no library wraps it or moves its blocks: the engine would run
            # something else.
            there = " (it is one of model.module)" if name in dir(nn.Module) else ""
            raise AttributeError(
                f"Model has no attribute {name!r}{there}: it is no torch.nn.Module, its `module` "
                "is; adapters are added by load(…, LoraConfig(…))",
                name=name,
                obj=self,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(
            **{part.name: deepcopy(getattr(self, part.name), memo) for part in fields(self)}
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling: a family's functions and files that are open have no form in a file."""
        raise UserError(
            "a Model cannot be pickled, and so not be sent to another process: call load there, "
            "save_adapter for its adapter, or torch.save(model.module) for its weights"
        )

    @property
    def device(self) -> torch.device:
        """The first device, which inputs are sent to."""
        return next(self.module.embed.parameters()).device

    def to(self, device: torch.device | str) -> Self:
        """Move all weights to one device, in place; dtypes stay.

        Raises:
            UserError: If blocks are streamed, or ranks divide the weights: these stay where they
                were loaded.
        """
        self._check_undivided("to(device)", "devices")
        module: Any = self.module
        module.to(device)
        return self

    def save_adapter(self, path: str | Path, *, form: str = "", dtype: str = "bf16") -> Path:
        """Write the adapter into one file, which is read back and compared before it gets its name.
        Where ranks divide the weights, all call it.

        Args:
            path: The file; its name ends with .safetensors.
            form: Names of the tensors: `official`, which ComfyUI and diffusers load, `diffusers`,
                `diffsynth` or `musubi`. Empty: the first one that has a name for each layer.
            dtype: `bf16` or `fp32`.

        Raises:
            UserError: If there is no adapter, the form cannot represent it, or the file cannot be
                written.
        """
        file = local_path(str(path))
        if file.suffix != ".safetensors":
            raise UserError(
                f"path = {str(path)!r} does not end with .safetensors, which adapter files are; "
                f"correct it"
            )
        if not adapter_layers(self.module):
            raise UserError(
                "the model has no adapter to save; load it with one, such as LoraConfig(r=16)"
            )
        adapter = self.origin.adapter
        if form:
            wanted = ExportConfig(forms=(form,), dtype=dtype)
        else:
            wanted = with_forms_of(ExportConfig(dtype=dtype), adapter, self.spec)
            wanted = replace(wanted, forms=wanted.forms[:1])
        check_export(self.spec, wanted, adapter)
        about = {"ditkit.model": self.spec.name, "ditkit.preset": self.origin.preset}

        def write() -> None:
            with self.readable():
                export_adapter(
                    self.module,
                    self.spec,
                    file.parent,
                    file.stem,
                    wanted,
                    metadata=about,
                    exact=True,
                    whole_in=self.whole_in,
                )

        if self.shards is None:
            write()
        else:
            self.shards.on_first(write)
        return file

    def load_adapter(self, path: str | Path) -> None:
        """Read an adapter file of any program that names tensors of this model, in place.

        A model without an adapter gets one with the file's layers, ranks and scales. One that has
        an adapter gets the file's values, and its parameters stay those that an optimizer has.

        Raises:
            UserError: If the file does not fit the model or its adapter, blocks are streamed, or
                ranks divide the weights.
        """
        self._check_undivided("load_adapter(path)", "adapter")
        names = self.spec.architecture.names
        modules = layers_of(self.spec.architecture.build, self.origin.arch)
        file = open_adapter(local_path(str(path)), names=names, modules=modules)
        before = {
            name: weight for name, weight in self.module.named_parameters() if is_adapter_name(name)
        }
        if before:
            self._check_same_layers(file)
        else:
            config, _ = config_from_file(AdapterConfig(), file)
            module: Any = self.module
            inject(module, config, self.spec.adapters.targets)
            self.loaded_from = replace(self.origin, trained=config)
        layers = adapter_layers(self.module)
        values = initial_adapter(file, adapter_layers(self.module))

        def device_of(name: str) -> torch.device:
            return next(layers[name].get_base_layer().parameters()).device

        def start(name: str) -> Mapping[str, Tensor]:
            parts, scale = values(name), layers[name].scaling["default"]
            if (up := parts.get("lora_B.weight")) is not None:
                parts = {**parts, "lora_B.weight": up * (file.modules[name].scale / scale)}
            return parts

        initialise(self.module, 0, device_of=device_of, start=start)
        for name, parameter in before.items():
            owner, _, leaf = name.rpartition(".")
            registered = self.module.get_submodule(owner)._parameters
            value = registered[leaf]
            assert value is not None
            parameter.data.copy_(value.data)
            registered[leaf] = parameter
        self.trainable = trainable_parameters(self.module)

    def _check_same_layers(self, file: AdapterFile) -> None:
        layers, path = adapter_layers(self.module), file.source.path
        remedy = "load the file into a model without an adapter"
        if layers.keys() != file.modules.keys():
            differing = min(layers.keys() ^ file.modules.keys())
            raise UserError(
                f"{path} adapts other layers than the model's adapter, such as {differing}; "
                f"{remedy}"
            )
        for name, module in file.modules.items():
            rank, scale = layers[name].r["default"], layers[name].scaling["default"]
            # Of a LoRA the scale goes into its values: most files have a scale of 1.
            if module.rank != rank or (module.method != "lora" and module.scale != scale):
                raise UserError(
                    f"{path} has rank {module.rank} and scale {module.scale:g} for {name}, and the "
                    f"model's adapter has {rank} and {scale:g}; {remedy}"
                )

    def _check_undivided(self, method: str, setting: str) -> None:
        """Refuse what needs all weights where they were loaded for good."""
        if self.streamer is not None or self.shards is not None:
            reason = "streams blocks" if self.streamer is not None else "is divided over ranks"
            raise UserError(
                f"{method} does not work on a model that {reason}; call load again with another "
                f"`{setting}`"
            )

    def __repr__(self) -> str:
        weights = [*self.module.parameters()]
        total, trained = sum(map(torch.numel, weights)), sum(map(torch.numel, self.parameters()))
        devices = ", ".join(dict.fromkeys(str(weight.device) for weight in weights))
        preset = (
            ""
            if self.loaded_from is None or not self.loaded_from.preset
            else f" {self.loaded_from.preset}"
        )
        return f"<Model {self.spec.name}{preset}: {total:,} parameters in {dtype_name(self.matmul_dtype)} on {devices}, {trained:,} trained>"

    @cached_property
    def adapts(self) -> bool:
        """Whether adapters are trained, which are small next to the frozen base; False if all
        weights are."""
        return any(not parameter.requires_grad for parameter in self.module.parameters())

    @property
    def matmul_dtype(self) -> torch.dtype:
        """Dtype of the blocks' matmuls."""
        return precision_of(self.module).matmul

    @property
    def origin(self) -> ModelOrigin:
        """The files that it comes from: `origin.stored` reads a base parameter again, before it was
        rounded or quantized."""
        assert self.loaded_from is not None, "built without files"
        return self.loaded_from

    @property
    def config_json(self) -> Path | None:
        """The config.json of the transformer's files, if they have one."""
        return config_json_of(self.origin.stored.source.path)

    def weights(self) -> list[Tensor]:
        """All parameters and buffers: of those that ranks divide, the rows of this one; of streamed
        blocks nothing is on a device."""
        if self.streamer is not None:
            # A forward leaves blocks there. Whoever empties their memory and fills it again does so
            # on the device's own stream, which would later give it to other work while the
            # streamer's stream still copies from it.
            self.streamer.host_changed()
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return tensors if self.shards is None else self.shards.local_parts(tensors)

    def readable(self) -> AbstractContextManager[None]:
        """Inside the block every weight can be read, on the host or its device; the model may be
        unable to run meanwhile.

        Where ranks divide the weights, only the trained ones can be.
        """
        if self.shards is not None:
            return self.shards.readable()
        return nullcontext() if self.streamer is None else self.streamer.on_host()

    def whole_in(self, module: nn.Module) -> AbstractContextManager[None]:
        """Inside this block, which is inside `readable`, all weights of one module can be read,
        also where ranks divide them."""
        return nullcontext() if self.shards is None else self.shards.whole_in(module)

    @contextmanager
    def readable_one_by_one(self) -> Iterator[Callable[[str], Tensor]]:
        """Inside the block adapters can be read, and base parameters with the function, by name;
        what is not on `meta` and not quantized can be read in the model as well. Of weights that
        ranks divide, no host has more than one whole."""
        original = self.origin.stored.read
        if self.shards is None:
            with self.readable():
                yield original
            return
        coarse = quantized_weights(self.module)
        paths = {canonical_name(path): path for path, _ in self.module.named_parameters()}
        with self.shards.one_by_one(is_adapter_name) as gathered:
            yield lambda name: original(name) if name in coarse else gathered(paths[name])
