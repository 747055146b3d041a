"""Loads frozen encoders from safetensors: a library's module is built on `meta`, then filled by our
own strict reader.

Folders and single files are read in one way. The libraries' own loaders would only warn about a
missing tensor, and go on with random numbers in its place.
"""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ditkit_core.errors import UserError, given_to_library
from ditkit_core.io.console import NullProgress, warn
from ditkit_core.io.files import read_json_object, readable
from ditkit_core.io.memory import is_out_of_memory, release_memory
from ditkit_core.io.rng import seeded
from ditkit_core.io.safetensors import SafetensorsSource
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.meta import on_meta
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import dtype_name
from ditkit_core.models.state_dict import StateDictNames, TensorSlice
from ditkit_core.models.tiling import Tiles, in_tiles
from ditkit_core.weights.fp8_scaled import open_weights
from ditkit_core.weights.load import Advice, load_into, match
from ditkit_core.weights.quantize import hold_as_stored, stored_formats

Module = TypeVar("Module", bound=nn.Module)

# Files that decide an encoder's results. A README or a .git folder does not.
_COUNTED = (".safetensors", ".json", ".model", ".txt")
_WHOLE_BYTES = 2**28
_SAMPLED_BYTES = 2**20
_SAMPLES = 64


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's `config.json`."""
    path = folder / "config.json"
    with readable(path):
        if not path.exists():
            raise UserError(
                f"{folder} has no config.json; give the component's folder, or a single "
                f".safetensors file"
            )
    return read_json_object(path)


def find_weights(
    components: ModelPaths,
    part: str,
    config_of_file: Callable[[SafetensorsSource], dict[str, Any]],
    *,
    kind: str = "",
    remedy: str = "",
    safe_names: Mapping[str, str] = MappingProxyType({}),
) -> tuple[SafetensorsSource, dict[str, Any]]:
    """Find a component's weights and its configuration. Headers are read, but no weights.

    Args:
        part: The component, as for `ModelPaths.locate`.
        config_of_file: Reads a configuration off a single file's shapes, in place of a folder's
            `config.json`.
        kind: The library's class that the configuration must name, if it names one; empty for any.
        remedy: What the user can do about another class.
    """
    source = open_weights(components.locate(part, safe_names=safe_names))
    config = read_config(source.path) if source.path.is_dir() else config_of_file(source)
    if kind and (class_name := config.get("_class_name", kind)) != kind:
        raise UserError(f"{source.path} contains {class_name}, not {kind}; {remedy}")
    return source, config


def build_frozen(
    make: Callable[[Any], Module], config: Mapping[str, Any], source: SafetensorsSource
) -> Module:
    """Build a library's module on `meta` from its configuration, which must not describe far more
    parameters than the files have tensors."""
    failure = f"{source.path}: no model can be built from its configuration"
    remedy = "fetch its config.json again"
    with (
        given_to_library(failure, remedy),
        at_most_parameters(4 * len(source.tensors) + 1000),
        on_meta(),
    ):
        return make(config)


@contextmanager
def at_most_parameters(number: int) -> Iterator[None]:
    """Stop a module's constructor at this number of parameters: a damaged depth would take hours
    and all memory, on `meta` too."""
    counter = itertools.count(1)

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if next(counter) > number:
            raise ValueError(f"more than {number} parameters")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def locate_frozen(
    model: nn.Module,
    source: SafetensorsSource,
    names: StateDictNames,
    *,
    key: str = "the component's path in [model]",
    tied: Mapping[str, str] | None = None,
    ignore: frozenset[str] = frozenset(),
) -> dict[str, tuple[TensorSlice, ...]]:
    """Where the files store each parameter of a module on `meta`.

    Args:
        names: Maps names of the file to the module's.
        key: The setting that names the component, for messages.
        tied: Modules that share the weight of another, by name: left out, as files may or may not
            contain them.
        ignore: Names in the file that may be left over.
    """
    skipped = {f"{name}.weight" for name in tied or ()}
    wanted = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in skipped
    }
    remedy = f"set {key} to a complete folder or file of it"
    advice = Advice(described_by="the component's configuration", remedy=remedy)
    return match(source, names, wanted, ignore=lambda name: name in ignore | skipped, advice=advice)


def load_frozen(
    model: nn.Module,
    source: SafetensorsSource,
    names: StateDictNames,
    *,
    device: torch.device,
    dtype_of: Callable[[str], torch.dtype],
    key: str = "the component's path in [model]",
    tied: Mapping[str, str] | None = None,
    ignore: frozenset[str] = frozenset(),
) -> None:
    """Load every parameter of a module on `meta`, freeze it, and put it into eval mode. Matrices in
    8 or 4 bits stay so.

    `dtype_of` gives the dtype of a parameter on the device. Other arguments are as for
    `locate_frozen`; the weights of tied modules are set to the others'.
    """
    tied = tied or {}
    mapping = locate_frozen(model, source, names, key=key, tied=tied, ignore=ignore)
    # After matching, because the mapping tells which of the module's layers are codes in the file.
    hold_as_stored(model, stored_formats(model, source, mapping))
    load_into(model, source, mapping, device_of=lambda name: device, dtype_of=dtype_of)
    for name, other in tied.items():
        model.get_submodule(name).weight = model.get_submodule(other).weight
    # eval, because some encoders have dropout, and cached results must not be random.
    model.requires_grad_(False).eval()


@dataclass(eq=False)
class FrozenModule:
    """A library's module that is loaded from its files when it is needed, and freed afterwards."""

    make: Callable[[Mapping[str, Any]], nn.Module]
    """Builds the module from its configuration, on the default device."""
    config: Mapping[str, Any]
    source: SafetensorsSource
    names: StateDictNames
    """Maps names of the file to the module's."""
    device: torch.device
    dtype: torch.dtype
    key: str
    """The setting that names the component, for messages."""
    ignore: frozenset[str] = frozenset()
    """Names in the file that may be left over."""
    in_fp32: frozenset[str] = frozenset()
    """Names of values that are fp32 in any dtype."""
    finish: Callable[[Any], object] = lambda module: None
    """Called with the loaded module: sets what files do not store, and tries values of the
    configuration that the library only reads in use."""
    module: Any = field(default=None, init=False)
    """None while it is not loaded. `Any`, because only the caller knows the library's class."""
    _loaded_as: tuple[torch.device, torch.dtype] | None = field(default=None, init=False)

    def load(self) -> None:
        """Load the weights to the device, unless they are there."""
        self.load_as(self.device, self.dtype)

    def load_as(self, device: torch.device, dtype: torch.dtype) -> None:
        """The same for another device and dtype."""
        if self._loaded_as == (device, dtype):
            return
        self.module, self._loaded_as = None, None
        module = build_frozen(self.make, self.config, self.source)
        load_frozen(
            module,
            self.source,
            self.names,
            device=device,
            dtype_of=lambda name: torch.float32 if name in self.in_fp32 else dtype,
            key=self.key,
            ignore=self.ignore,
        )
        with given_to_library(
            f"{self.source.path}: its configuration has a damaged value",
            "fetch its config.json again",
        ):
            self.finish(module)
        # Set last: a module whose weights could not all be read never counts as loaded.
        self.module, self._loaded_as = module, (device, dtype)

    def unload(self) -> None:
        """Free the weights."""
        self.module, self._loaded_as = None, None


def fingerprint(path: Path, *settings: object) -> str:
    """Digest of a component's files and of all settings that change its results, without loading
    it.

    In a folder, weights, configurations and tokenizer files count. Of a large weight file, only the
    size and 64 MiB spread over it, the header included, are read. Two sets of weights differ nearly
    everywhere, and reading 11 GB at each start would take longer than everything else if the cache
    is complete.
    """
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    with readable(path):
        files = (
            sorted(file for file in path.iterdir() if file.suffix in _COUNTED)
            if path.is_dir()
            else [path]
        )
        for file in filter(Path.is_file, files):  # a pipe would be waited for
            size = file.stat().st_size
            # A single file may be renamed without another digest; in a folder, names tell files
            # apart.
            digest.update(f"\0{file.name if path.is_dir() else ''}\0{size}\0".encode())
            with open(file, "rb") as stream:
                if size <= _WHOLE_BYTES:
                    digest.update(stream.read(size))
                    continue
                # Evenly spaced from the first byte to the last, so that every layer has a chance to
                # be read.
                for sample in range(_SAMPLES):
                    stream.seek(sample * (size - _SAMPLED_BYTES) // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()


Pass = Callable[[Any, Tensor, torch.device], Tensor]
"""From the module, a part of a clip and the device to the part's result, in fp32."""


@dataclass(eq=False, kw_only=True)
class FrozenVae(FrozenModule, ABC):
    """Pixels to normalised latents and back; an `Encoder` and a `Decoder`, and the base class of
    the families'."""

    items_at_once = 1
    recipe = "{}"
    """How latents are made, for `identity`; `{}` stands for the dtype."""

    mode: VaeMode
    """How it encodes; the module's dtype is the mode's."""
    decodings: Sequence[VaeMode]
    """The ways to decode; the first that memory has room for is taken. Empty: as it encodes."""
    tiles: Tiles
    """For modes that work tile by tile."""
    encode_clip: Pass
    decode_clip: Pass
    decoded: str = field(default="", init=False)
    """How the last sample was decoded, in words; empty before the first."""
    _failed: int = field(default=0, init=False)
    """Number of ways to decode for which memory had no room."""

    @property
    @abstractmethod
    def strides(self) -> tuple[int, int]:
        """Pixel frames per latent frame after the first, and pixels per latent pixel."""

    @cached_property
    def identity(self) -> str:
        """Digest of the weights and of how latents are made from them."""
        # none untiled: caches from before tiles stay valid
        tiles = (str(self.tiles),) if self.mode.tiled else ()
        return fingerprint(
            self.source.path, self.recipe.format(dtype_name(self.mode.dtype)), *tiles
        )

    @torch.no_grad()
    def encode(
        self,
        items: Sequence[Float[Tensor, "3 frames height width"]],
        advance: Callable[[float], None] = NullProgress.advance,
    ) -> list[dict[str, Tensor]]:
        """Latents [channels, f, h, w] of one clip, fp32, on the CPU, of about unit variance.

        The clip has pixels in [-1, 1]; `strides` divide its sides and all frames but the first,
        because a VAE silently drops the rest.
        """
        (clip,) = items
        (_, length, height, width), (frames, pixels) = clip.shape, self.strides
        assert (length - 1) % frames == height % pixels == width % pixels == 0, (
            f"{length} frames of {height} x {width}"
        )
        tiles = self.tiles if self.mode.tiled else None
        latents = self._run(self.encode_clip, clip, self.device, tiles, 1, Fraction(1, pixels))
        advance(1.0)
        return [{"latents": latents}]

    @torch.no_grad()
    def decode(
        self, latents: Float[Tensor, "channels f h w"], seed: int = 0
    ) -> Float[Tensor, "3 frames height width"]:
        """Load the VAE and decode latents to pixels in [0, 1], fp32, on the CPU; noise that a VAE
        adds is of the sample's seed.

        The first way that memory has room for is taken; if there is no room for any, the host's. A
        way that failed is not tried again until the weights are freed.
        """
        decodings, pixels = self.decodings or (self.mode,), self.strides[1]
        host = VaeMode(torch.float32, decodings[-1].tiled)
        ways = [*((self.device, decoding) for decoding in decodings), (torch.device("cpu"), host)]
        while True:
            device, way = ways[self._failed]
            try:
                self.load_as(device, way.dtype)
                tiles = self.tiles if way.tiled else None
                with seeded(device, seed, "decoder"):
                    result = self._run(
                        self.decode_clip, latents, device, tiles, pixels, Fraction(pixels)
                    )
                self.decoded = way.label if device == self.device else f"{way.label} on the CPU"
                return result
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or self._failed == len(ways) - 1:
                    raise
            # Here and not above: the error kept the tensors of the attempt alive.
            failed, self._failed = self._failed, self._failed + 1
            super().unload()
            release_memory()
            following = ways[self._failed]
            where = "on the CPU" if following[0] != device else following[1].label
            warn(
                f"no room on {device} to decode a sample {ways[failed][1].label}; decoding it "
                f"{where}"
            )

    def unload(self) -> None:
        """Free the weights."""
        super().unload()
        self._failed = 0  # the next samples may find more room

    def _run(
        self,
        work: Pass,
        clip: Tensor,
        device: torch.device,
        tiles: Tiles | None,
        pixels: int,
        scale: Fraction,
    ) -> Tensor:
        """The result on the CPU for a clip, whole or tile by tile; `pixels` and `scale` as for
        `in_tiles`."""

        def part_result(part: Tensor) -> Tensor:
            return work(self.module, part, device)

        return (
            part_result(clip).cpu()
            if tiles is None
            else in_tiles(part_result, clip, tiles, pixels=pixels, scale=scale)
        )
