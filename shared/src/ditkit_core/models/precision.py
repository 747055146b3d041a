"""Which dtype an operation runs in, written down once and cast explicitly everywhere.

There is no autocast inside ditkit: the engine disables an outer one at the seam, and models cast where they mean to.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of a short name (`bf16`, `fp16`, `fp32`, `fp64`).

    Raises:
        UserError: If the name is none of these.
    """
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype (`bf16`)."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


_DEFAULT: Any = None
"""In place of a place's dtype: what the class says of it."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of every place of a step, by name.

    A model takes its dtypes from here, never from a tensor that happens to be at hand: the residual stream is wider than the
    matmuls, and a quantized weight has a dtype of its own. What is not given is fp32, or wider if matmuls are; `timestep` is
    fp64, and `attention` goes with the matmuls. Inside a kernel, sums and statistics are fp32 or wider whatever the place.
    """

    matmul: torch.dtype = torch.bfloat16
    """Linear layers of the blocks, and those by which latents and text come in."""
    timestep: torch.dtype = _DEFAULT
    """The number t. Its sinusoid is computed in this dtype too, or in fp32 if that is wider."""
    rotary_tables: torch.dtype = _DEFAULT
    """Cosines and sines of positions; their angles are fp64 always."""
    rotary: torch.dtype = _DEFAULT
    """The rotation of q and k by them."""
    qk_norms: torch.dtype = _DEFAULT
    """RMS norms of q and k. A narrow one is rounded before it is multiplied by its weight, as the official models do it."""
    norms: torch.dtype = _DEFAULT
    """Layer norms of the residual stream in the blocks."""
    modulation: torch.dtype = _DEFAULT
    """Scale, shift and gate: how they are made of time, travel, and are applied to a norm's result."""
    residual: torch.dtype = _DEFAULT
    """The residual stream between sub-layers; a sum is rounded to it once."""
    entry: torch.dtype = _DEFAULT
    """The residual stream as it enters the first block, and its first norm there if this is narrower: the official models leave what comes
    in as the matmul gave it. By default as `residual`."""
    time_mlp: torch.dtype = _DEFAULT
    """What the features of t (and of guidance) go through."""
    head: torch.dtype = _DEFAULT
    """The head: its norm, modulation and matmul, and with them the prediction."""
    attention: torch.dtype = _DEFAULT
    """q, k and v as the attention kernel gets them."""
    accumulation: torch.dtype = _DEFAULT
    """Gradients of trained parameters, summed over micro-batches."""
    optimizer: torch.dtype = _DEFAULT
    """The optimizer's averages."""
    reduction: torch.dtype = _DEFAULT
    """Gradients while they are summed over ranks."""

    def __post_init__(self) -> None:
        island = torch.promote_types(self.matmul, torch.float32)
        entry = island if self.residual is None else self.residual
        others = {"timestep": torch.float64, "attention": self.matmul, "entry": entry}
        for place in PLACES:
            if getattr(self, place) is None:
                object.__setattr__(self, place, others.get(place, island))

    def norms_of(self, stream: torch.dtype) -> torch.dtype:
        """The dtype of a layer norm of the residual stream, which is still in its `entry` dtype before the first sum."""
        entering = stream != self.residual and stream.itemsize < self.norms.itemsize
        return stream if entering else self.norms

    def described(self, *, averages_in_8_bits: bool = False, fused_backward: bool = False) -> str:
        """What each place runs in: `timestep fp64, rotary tables fp32, …, matmul bf16`.

        Args:
            averages_in_8_bits: Whether the optimizer of `optim.name` keeps its averages in 8 bits.
            fused_backward: Whether gradients are applied as they come: nothing is accumulated then.
        """
        places = [place for place in (*PLACES[1:], "matmul") if not (fused_backward and place == "accumulation")]
        names = {place: dtype_name(getattr(self, place)) for place in places}
        if averages_in_8_bits:
            names["optimizer"] = "8 bits"
        return ", ".join(f"{place.replace('_', ' ')} {name}" for place, name in names.items())


PLACES = tuple(field.name for field in fields(Precision))
"""Names of all places; the first is `matmul`."""

FAST: Mapping[str, str] = MappingProxyType({"norms": "matmul", "modulation": "matmul", "residual": "matmul"})
"""The preset `fast`: what is as large as the stream goes with the matmuls. Sums stay fp32 inside the kernels. The timestep, its MLP and the
head are numbers for each sample, or of the last layer alone: narrower, they would cost accuracy and save nothing; q and k are normalised
and rotated in one pass that narrower dtypes would take apart."""

Dtype = Literal["bf16", "fp16", "fp32", "fp64"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """The `[precision]` section: which dtype each place of a step runs in; that of the matmuls is model.dtype."""

    preset: Literal["default", "reference", "fast"] = setting("default", resume="stated")
    """Dtypes of the places that are not set: `default` (all but matmuls and attention in fp32 or wider), `reference` (as the official
    code of the model runs), `fast` (norms, modulation and residual stream in model.dtype: less memory, less accurate)."""
    timestep: Dtype | None = setting(None, resume="stated")
    """The number t and its sinusoid; bf16 is the largest single error there is."""
    rotary_tables: Dtype | None = setting(None, resume="stated")
    """Cosines and sines of positions."""
    rotary: Dtype | None = setting(None, resume="stated")
    """The rotation of q and k."""
    qk_norms: Dtype | None = setting(None, resume="stated")
    """RMS norms of q and k."""
    norms: Dtype | None = setting(None, resume="stated")
    """Layer norms of the residual stream."""
    modulation: Dtype | None = setting(None, resume="stated")
    """Scale, shift and gate."""
    residual: Dtype | None = setting(None, resume="stated")
    """The residual stream: what train.checkpointing = full keeps of a block is as large as this makes it."""
    entry: Dtype | None = setting(None, resume="stated")
    """The residual stream as it enters the first block; unset: as residual."""
    time_mlp: Dtype | None = setting(None, resume="stated")
    """What the features of t and guidance go through."""
    head: Dtype | None = setting(None, resume="stated")
    """The head's norm, modulation and matmul."""
    attention: Dtype | None = setting(None, resume="stated")
    """q, k and v as attention gets them; unset: model.dtype."""
    accumulation: Dtype | None = setting(None, resume="stated")
    """Gradients, summed over the micro-batches of a step."""
    optimizer: Dtype | None = setting(None, resume="refused")
    """The optimizer's averages, which a save holds."""
    reduction: Dtype | None = setting(None, resume="stated")
    """Gradients while they are summed over ranks."""

    def precision(self, matmul: torch.dtype, reference: Mapping[str, str]) -> Precision:
        """The dtypes of a run.

        Args:
            matmul: Of `model.dtype`.
            reference: The preset of that name, as the model's family has it: place to the name of a dtype, or to `matmul` for what
                goes with the matmuls. Where the matmuls are wider than a named dtype, that goes with them too.

        Raises:
            UserError: If a place cannot run in fp16.
        """
        preset = {"default": {}, "reference": reference, "fast": FAST}[self.preset]
        chosen = {
            place: matmul if name == "matmul" else torch.promote_types(matmul, DTYPES[name])
            for place, name in preset.items()
        }
        given = {place: getattr(self, place) for place in PLACES[1:]}
        chosen |= {place: DTYPES[name] for place, name in given.items() if name is not None}
        for place, dtype in chosen.items():
            if dtype == torch.float16 and place in _NO_FP16:
                own = given[place] is not None
                what = (
                    f"precision.{place} = fp16" if own else f"precision.preset = {self.preset} with model.dtype = fp16"
                )
                where = "" if own else f" in {place.replace('_', ' ')}"
                remedy = "set bf16 or fp32" if own else f"set precision.{place} = bf16 or fp32"
                raise UserError(f"{what}: {_NO_FP16[place]}{where}; {remedy}")
        return Precision(matmul=matmul, **chosen)

    def check_training(self, *, optimizer: str, in_8_bits: Sequence[str], fused_backward: bool) -> None:
        """Refuse a dtype that a place of the training would not have.

        Args:
            optimizer: `optim.name`.
            in_8_bits: Names of the optimizers that keep their averages in 8 bits, at least one.
            fused_backward: `optim.fused_backward`.

        Raises:
            UserError: Naming the place and what to do.
        """
        if self.optimizer is not None and optimizer in in_8_bits:
            raise UserError(
                f"precision.optimizer = {self.optimizer}: optim.name = {optimizer} holds averages in 8 bits; leave it out, or for "
                "averages in fp32 set optim.name = adamw"
            )
        if self.optimizer not in (None, "fp32"):
            raise UserError(
                f"precision.optimizer = {self.optimizer}: averages and updates are fp32; leave it out, or for less memory set "
                f"optim.name = {' or '.join(in_8_bits)}, which holds averages in 8 bits"
            )
        if self.reduction not in (None, "fp32"):
            raise UserError(
                f"precision.reduction = {self.reduction} is of gradients that are summed over ranks, and this run has one; leave it out"
            )
        if self.accumulation is not None and fused_backward:
            raise UserError(
                f"precision.accumulation = {self.accumulation} is of gradients that are summed over micro-batches, and "
                "optim.fused_backward applies each as it comes; leave one of them out"
            )


_OVERFLOWS = "values pass 65504, the largest of fp16"
_UNDERFLOWS = "gradients underflow in fp16 without a loss scaler"
_NO_FP16: Mapping[str, str] = {
    **dict.fromkeys(("norms", "modulation", "residual", "entry", "head"), _OVERFLOWS),
    **dict.fromkeys(
        ("rotary", "qk_norms", "time_mlp", "attention", "accumulation", "optimizer", "reduction"), _UNDERFLOWS
    ),
}
"""Why a place cannot run in fp16. The timestep and rotary tables can: they are bounded and have no gradient."""


def precision_of(stage: nn.Module) -> Precision:
    """The dtypes that a model, or a stage of it, computes in."""
    found = (vars(module).get("precision") for module in stage.modules())
    return next((each for each in found if isinstance(each, Precision)), Precision())


def set_precision(model: nn.Module, precision: Precision) -> None:
    """Have a model that is built compute in other dtypes; its parameters stay as they are."""
    for module in model.modules():
        if isinstance(vars(module).get("precision"), Precision):
            module.precision = precision  # type: ignore[assignment]


def compute_fp32_in_fp32() -> None:
    """Keep TF32, which leaves ten bits of a fraction, out of fp32 matmuls and convolutions on NVIDIA cards.

    torch has it on for convolutions unless told otherwise, which would round every latent, and any library may switch it
    on for matmuls. Set once for a process, because autograd's threads share it. The flags are the older of torch's two
    interfaces: once the newer one has been written, torch's own reads of the older one raise.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


@contextmanager
def autocast_disabled(device_type: str) -> Iterator[None]:
    """Run without an outer autocast, which nn.Linear, adapters and the backward of every matmul would obey."""
    with torch.autocast(device_type, enabled=False), torch.autocast("cpu", enabled=False):
        yield
