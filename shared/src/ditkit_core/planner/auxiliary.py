"""What encoding and drawing need beside the transformer's training: each encoder alone, and drawing next to what training holds.

Everything is run on fake tensors by the functions that the encoders and the sampler call themselves, so that a plan follows them.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ditkit_core.adapters.inject import AdapterConfig
from ditkit_core.models.encoders import Companion, Holding
from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import run_plain
from ditkit_core.models.spec import ModelSpec
from ditkit_core.nn.context import as_on
from ditkit_core.planner.memory_tracker import Ledger
from ditkit_core.planner.reduced_model import materialise, thinned
from ditkit_core.weights.layer_streaming import too_large

_DEVICE = torch.device("cpu", 1)
"""Under fake tensors another device than the host."""
Size = tuple[int, int, int]
"""Frames, height and width, in pixels."""
Mode = Literal["whole", "layer by layer", "in tiles"]


class Measured(NamedTuple):
    """Bytes that a companion holds when it holds most."""

    weights: int
    peak: int
    """The weights included."""


class Room(NamedTuple):
    """Where a stage runs."""

    device: str
    available: int | None
    """Bytes, what is reserved for others taken off; None where nobody knows."""
    kind: str = "cuda"
    """`cuda` or `cpu`."""


@dataclass(frozen=True, kw_only=True)
class CompanionRow:
    """One line of a plan: what a stage beside the training itself holds on its device."""

    stage: str
    """`encode`, `sample`, or `preview` where these are drawn on a device of their own."""
    name: str
    device: str
    size: Size | None
    """What it is for; None where that does not matter."""
    mode: Mode
    weights: int
    """Bytes of its own weights."""
    beside: int
    """Bytes of what lies there meanwhile: of the trained model while samples are drawn, of its copy that previews are drawn with."""
    peak: int
    """Bytes of all of it."""
    available: int | None
    remedy: str
    """What to change where it does not fit, with what is needed then; empty where it fits."""

    @property
    def fits(self) -> bool | None:
        """Whether there is room; None where nobody knows."""
        return None if self.available is None else self.peak <= self.available

    @property
    def missing(self) -> int:
        """Bytes that are lacking; 0 if it fits or nobody knows."""
        return 0 if self.available is None else max(0, self.peak - self.available)


def measure(
    companion: Companion,
    size: Size,
    *,
    text_dtype: torch.dtype,
    mode: Mode = "whole",
    kind: str = "cuda",
) -> Measured:
    """Run a companion on fake tensors.

    Args:
        companion: The module and what calls it.
        size: What it works on.
        text_dtype: Of text encoders.
        mode: As a whole, layer by layer, or on the largest tile; one that it has.
        kind: Kind of device that it is to run on: `cuda` or `cpu`.
    """
    module = companion.build(text_dtype)
    with _fake(kind) as ledger:
        if mode == "layer by layer":
            assert companion.run_streamed is not None
            companion.run_streamed(module, _DEVICE, lambda: _passing(module, ledger))
        else:
            _give_memory(module, ledger)
            if mode == "in tiles":
                assert companion.tiles is not None
                size = companion.tiles.largest(size)
            companion.run(module, size, _DEVICE)
    return Measured(ledger.at_peak[_DEVICE]["weights"], ledger.peak[_DEVICE])


@contextmanager
def _fake(kind: str) -> Iterator[Ledger]:
    """Fake tensors without gradients, counted, as on a kind of device; the process's generator stays as it was."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # torch_remat and libraries compare addresses, of which fake tensors have none
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(as_on(kind))
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode())
        yield stack.enter_context(Ledger(rounding=512 if kind == "cuda" else 1))


def _give_memory(module: nn.Module, ledger: Ledger) -> None:
    """Parameters and buffers in memory in place of those on `meta`; what shares one goes on sharing it."""
    given: dict[int, Any] = {}
    with ledger.purpose("weights"):
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in given:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=_DEVICE)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        given[id(tensor)] = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
                    tensors[name] = given[id(tensor)]


def _passing(module: nn.Module, ledger: Ledger) -> Holding:
    """Memory for weights to pass through, as `streamed.PassingMemory` keeps it: a tensor for each name and shape, kept for the next."""
    kept: dict[tuple[str, torch.Size], nn.Parameter] = {}

    @contextmanager
    def holding(name: str) -> Iterator[nn.Module]:
        part = module.get_submodule(name)
        before = []
        with ledger.purpose("weights"):
            for inner, owner in part.named_modules():
                for leaf, tensor in owner._parameters.items():
                    if tensor is None:
                        continue
                    key = (f"{inner}.{leaf}", tensor.shape)
                    if key not in kept:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=_DEVICE)
                        kept[key] = nn.Parameter(fake, requires_grad=False)
                    before.append((owner, leaf, tensor))
                    owner._parameters[leaf] = kept[key]
        yield part
        for owner, leaf, tensor in before:
            owner._parameters[leaf] = tensor

    return holding


def denoising_bytes(
    spec: ModelSpec,
    arch: Any,
    precision: Precision,
    adapter: AdapterConfig,
    size: Size,
    *,
    references: Sequence[tuple[int, int]] = (),
    quantize: str = "none",
    kind: str = "cuda",
) -> int:
    """The most that one call of the transformer without gradients holds above its weights; inputs included.

    One block of each kind is run, because nothing of a block stays but what it hands on.

    Args:
        spec: The model's family.
        arch: Its architecture.
        precision: Its dtypes.
        adapter: What is trained, which runs beside the base.
        size: What is drawn.
        references: Height and width of each picture to edit.
        quantize: What the blocks' frozen matrices are held in: what they are multiplied as is made for each product.
        kind: Kind of device that it is to run on: `cuda` or `cpu`.
    """
    model: Any = thinned(spec, arch, precision, adapter, quantize=quantize)
    with torch.device("meta"):
        item = spec.training.empty_item(arch, size, references)
    with _fake(kind) as ledger:
        with ledger.purpose("weights"):
            names = {id(module): name for name, module in model.whole.named_modules()}
            for stage in model.stages():
                materialise(stage.eval(), names[id(stage)], spec, dtype=precision.matmul, device=_DEVICE)
        weights = ledger.total(_DEVICE)
        item = {name: torch.empty(t.shape, dtype=t.dtype, device=_DEVICE) for name, t in item.items()}
        sigma = torch.empty(1, device=_DEVICE)
        run_plain(model, spec.training.make_inputs([item["latents"].float()], sigma, [item], 1.0))
    return ledger.peak[_DEVICE] - weights


def held_while_drawing(purposes: Mapping[str, int], *, averages: bool = False) -> int:
    """Bytes that a device of a run holds while samples are drawn between two of its steps: no gradients and no activations.

    Args:
        purposes: Bytes by purpose, as `plan.DevicePlan` has them.
        averages: Whether the optimizer averages the weights itself.
    """
    held = sum(purposes.get(name, 0) for name in ("weights", "adapters", "optimizer", "average"))
    # Drawing is done with averaged weights, and the trained ones are put aside meanwhile.
    return held + (purposes.get("adapters", 0) if averages or purposes.get("average") else 0)


def companion_rows(
    companions: Sequence[Companion],
    *,
    encoded: Sequence[Size],
    drawn: Sequence[Size],
    text_dtype: torch.dtype,
    streaming: str,
    encode_tiling: bool,
    sample_tiling: bool,
    encode_room: Room,
    sample_room: Room,
    beside: int,
    denoising: int,
    num_samples: int = 1,
    further: Sequence[tuple[Room, int]] = (),
) -> list[CompanionRow]:
    """What encoding and drawing hold, stage by stage.

    Args:
        companions: The family's, as `ModelSpec.companions` gives them.
        encoded: Sizes of all clips and references that are encoded.
        drawn: Sizes of the samples that are drawn; empty for none.
        text_dtype: `encode.text_dtype`.
        streaming: `encode.streaming`.
        encode_tiling: `encode.vae_tiling`.
        sample_tiling: `sample.vae_tiling`.
        encode_room: The encoders' device, which they have for themselves, one at a time.
        sample_room: The device that samples are decoded on, the model's first.
        beside: What a run holds there while samples are drawn (`held_while_drawing`).
        denoising: `denoising_bytes` of the largest sample.
        num_samples: How many are drawn in a row; from the second on, the decoder is there while the model runs.
        further: The other devices of a divided model, which denoise too, each with what a run holds there meanwhile.
    """
    planner = _Planner(text_dtype, streaming)
    rows: list[CompanionRow] = []
    for companion in companions:
        if companion.stage == "encode" and encoded:
            rows.append(planner.row(companion, encoded, encode_room, tiled=encode_tiling, beside=0))
    for companion in companions:
        if companion.stage == "sample" and drawn:
            row = planner.row(companion, drawn, sample_room, tiled=sample_tiling, beside=beside)
            first = _denoising_row(row, denoising, num_samples)
            rows += [first, *(_denoising_elsewhere(first, room, held, denoising) for room, held in further), row]
    return rows


@dataclass(frozen=True)
class _Planner:
    """What all rows of a plan share."""

    text_dtype: torch.dtype
    streaming: str

    def row(self, companion: Companion, sizes: Sequence[Size], room: Room, *, tiled: bool, beside: int) -> CompanionRow:
        mode: Mode = "in tiles" if tiled and companion.tiles else "whole"
        if companion.run_streamed and self._streams(companion, room):
            mode = "layer by layer"
        size, measured = self._most(companion, sizes, mode, room.kind)
        row = CompanionRow(
            stage=companion.stage, name=companion.name, device=room.device, mode=mode, weights=measured.weights,
            size=size if companion.tiles else None, beside=beside, peak=beside + measured.peak,
            available=room.available, remedy="",
        )  # fmt: skip
        if row.fits is False:
            object.__setattr__(row, "remedy", self._remedy(companion, row, size, room.kind))
        return row

    def _streams(self, companion: Companion, room: Room) -> bool:
        if self.streaming != "auto":
            return self.streaming == "always"
        needed = sum(tensor.nbytes for tensor in companion.build(self.text_dtype).state_dict().values())
        return room.available is not None and too_large(needed, room.available)

    def _most(self, companion: Companion, sizes: Sequence[Size], mode: Mode, kind: str) -> tuple[Size, Measured]:
        """The size that needs most: the largest picture, or the largest clip."""
        worst = {max(sizes, key=_area), max(sizes, key=_volume)}
        each = {size: self._measure(companion, size, mode, kind) for size in sorted(worst)}
        return max(each.items(), key=lambda found: found[1].peak)

    def _measure(self, companion: Companion, size: Size, mode: Mode, kind: str) -> Measured:
        return measure(companion, size, text_dtype=self.text_dtype, mode=mode, kind=kind)

    def _remedy(self, companion: Companion, row: CompanionRow, size: Size, kind: str) -> str:
        """What there is to do about a row that does not fit: the first that helps, or the one that helps most, and what then."""
        assert row.available is not None
        way: tuple[str, Mode] | None = None
        if companion.tiles and row.mode == "whole":
            way = f"{row.stage}.vae_tiling = true", "in tiles"
        elif companion.run_streamed and row.mode == "whole":
            way = 'encode.streaming = "always"', "layer by layer"
        last = 'encode.device = "cpu"' if row.stage == "encode" else "a smaller sample.height and sample.width"
        if way is None:
            return last
        needed = row.beside + self._measure(companion, size, way[1], kind).peak
        enough = needed <= row.available
        then = f"{way[0]} would need {needed / 2**30:.1f} GiB"
        return then if enough else f"{then}, which is still too much; {last}"


def _denoising_row(decoder: CompanionRow, denoising: int, num_samples: int) -> CompanionRow:
    held = decoder.weights if num_samples > 1 else 0
    peak = decoder.beside + held + denoising
    return _with_smaller_sizes(replace(decoder, name="denoising", mode="whole", weights=held, peak=peak))


def _denoising_elsewhere(first: CompanionRow, room: Room, held: int, denoising: int) -> CompanionRow:
    """Of a device that decodes nothing."""
    return _with_smaller_sizes(
        replace(first, device=room.device, weights=0, beside=held, peak=held + denoising, available=room.available)
    )


def _with_smaller_sizes(row: CompanionRow) -> CompanionRow:
    return replace(row, remedy="a smaller sample.height and sample.width" if row.fits is False else "")


def _area(size: Size) -> int:
    return size[1] * size[2]


def _volume(size: Size) -> int:
    return size[0] * size[1] * size[2]
