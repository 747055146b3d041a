"""The dtype of every operation, defined in one place; casts are explicit.

ditkit does not use autocast: the engine disables an outer autocast around the model, and models
cast where they need to.

The section `[precision]` is read before torch is imported, which takes seconds, so functions import
it where they need a dtype.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError, argument

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ditkit_core.models.protocol import StagedModel

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def parse_dtype(name: str) -> "torch.dtype":
    """The torch dtype of a short name (`bf16`, `fp16`, `fp32`, `fp64`)."""
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def dtype_name(dtype: "torch.dtype") -> str:
    """The short name of a dtype (`bf16`)."""
    torch_name = str(dtype).removeprefix("torch.")
    return next((name for name, candidate in DTYPES.items() if candidate == torch_name), torch_name)


Dtype = Literal["bf16", "fp16", "fp32", "fp64"]
"""The names of `DTYPES`."""
Value = TypeVar("Value")
_WRITTEN: Any = Dtype | None
"""The type of a place in a run file."""


@dataclass(frozen=True, kw_only=True)
class StepPlaces(Generic[Value]):
    """The places of a training step, which are groups of operations, without `matmul`, which
    model.dtype sets. `Precision` has a dtype for each; `PrecisionConfig` has the name of a dtype,
    or None where none is set."""

    timestep: Value = setting(None, resume="stated", after="preset", written=_WRITTEN)
    """The timestep t and its sinusoidal features; bf16 here causes the largest single error."""
    rotary_tables: Value = setting(None, resume="stated", written=_WRITTEN)
    """Cosines and sines of positions."""
    rotary: Value = setting(None, resume="stated", written=_WRITTEN)
    """The rotation of q and k."""
    qk_norms: Value = setting(None, resume="stated", written=_WRITTEN)
    """RMS norms of q and k."""
    norms: Value = setting(None, resume="stated", written=_WRITTEN)
    """Layer norms of the residual stream."""
    modulation: Value = setting(None, resume="stated", written=_WRITTEN)
    """Scale, shift and gate."""
    residual: Value = setting(None, resume="stated", written=_WRITTEN)
    """The residual stream; this decides how much memory train.checkpointing = full keeps for each
    block."""
    entry: Value = setting(None, resume="stated", written=_WRITTEN)
    """The residual stream at the input of the first block; unset means the same as residual."""
    time_mlp: Value = setting(None, resume="stated", written=_WRITTEN)
    """The MLP for the features of t and guidance."""
    head: Value = setting(None, resume="stated", written=_WRITTEN)
    """The head's norm, modulation and matmul."""
    attention: Value = setting(None, resume="stated", written=_WRITTEN)
    """q, k and v at the input of attention; unset means model.dtype."""
    accumulation: Value = setting(None, resume="stated", written=_WRITTEN)
    """Gradients, summed over the micro-batches of a step."""
    optimizer: Value = setting(None, resume="refused", written=_WRITTEN)
    """The optimizer's moments, which are part of a saved state."""
    reduction: Value = setting(None, resume="stated", written=_WRITTEN)
    """Gradients while they are summed over ranks."""


@dataclass(frozen=True, kw_only=True)
class Precision(StepPlaces["torch.dtype"]):
    """The dtype of every place in a training step, by name.

    A model takes its dtypes from here and never from some tensor at hand: the residual stream is
    wider than the matmuls, and a quantized weight has its own dtype. The default is fp32, or wider
    if matmuls are wider; `timestep` is fp64, and `attention` has the dtype of matmuls. Inside a
    kernel, sums and statistics are always fp32 or wider.

    The sinusoidal features of t are computed in `timestep`, or in fp32 if that is wider; the angles
    of positions are always fp64. In narrow `qk_norms` the result is rounded before it is multiplied
    by the weight, as in the official models. `modulation` is for computing scale, shift and gate
    from the timestep, storing them, and applying them to the result of a norm. Each sum of the
    residual stream is rounded to `residual` once. At `entry` the official models keep the dtype of
    the input matmul; the first norm has it too if it is narrower than `norms`.
    """

    matmul: "torch.dtype" = None  # type: ignore[assignment]  # bf16: __post_init__ imports torch
    """Linear layers of the blocks, and those that project latents and text at the input."""

    def __post_init__(self) -> None:
        import torch

        if self.matmul is None:
            object.__setattr__(self, "matmul", torch.bfloat16)  # the dataclass is frozen
        wide = torch.promote_types(self.matmul, torch.float32)
        entry = wide if self.residual is None else self.residual
        others = {"timestep": torch.float64, "attention": self.matmul, "entry": entry}
        for group in PLACES:
            if getattr(self, group) is None:
                object.__setattr__(self, group, others.get(group, wide))

    def norms_of(self, stream: "torch.dtype") -> "torch.dtype":
        """The dtype of a layer norm of the residual stream; before the first sum the stream still
        has its `entry` dtype."""
        entering = stream != self.residual and stream.itemsize < self.norms.itemsize
        return stream if entering else self.norms

    def described(
        self,
        *,
        base_compute: str = "dtype",
        averages_in_8_bits: bool = False,
        fused_backward: bool = False,
    ) -> str:
        """What each place runs in: `timestep fp64, rotary tables fp32, …, matmul bf16`.

        With `fused_backward` a step has one micro-batch whose gradients are applied as they come:
        nothing is accumulated then.
        """
        groups = [
            group
            for group in (*PLACES[1:], "matmul")
            if not (fused_backward and group == "accumulation")
        ]
        names = {group: dtype_name(getattr(self, group)) for group in groups}
        if averages_in_8_bits:
            names["optimizer"] = "8 bits"
        if base_compute != "dtype":
            names["matmul"] += f" (frozen base {base_compute})"
        return ", ".join(f"{group.replace('_', ' ')} {name}" for group, name in names.items())


PLACES = ("matmul", *(field.name for field in fields(StepPlaces)))
"""Names of all places; the first is `matmul`."""

FAST: Mapping[str, str] = MappingProxyType(
    {"norms": "matmul", "modulation": "matmul", "residual": "matmul"}
)
"""The preset `fast`: tensors as large as the residual stream get the dtype of matmuls. Sums inside
kernels stay fp32. The timestep, its MLP and the head are small (one value per sample, or one
layer): a narrower dtype would lose accuracy and save nothing. q and k are normalised and rotated in
one kernel, which narrower dtypes would split."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(StepPlaces[Dtype | None]):
    """The `[precision]` section: the dtype of each place of a step, which is a group of operations;
    model.dtype sets that of matmuls."""

    preset: Literal["default", "reference", "fast"] = setting("default", resume="stated")
    """Dtypes of the places that are not set: `default` (all in fp32 or wider except matmuls and
    attention), `reference` (like the model's official code), `fast` (norms, modulation and residual
    stream in model.dtype: less memory, less accurate)."""

    def precision(self, matmul: "torch.dtype", reference: Mapping[str, str]) -> Precision:
        """The dtypes of a run whose matmuls have this dtype.

        `reference` is the family's preset: from a place to the name of a dtype, or to `matmul`. If
        matmuls are wider than a named dtype, the place gets theirs.
        """
        import torch

        preset = {"default": {}, "reference": reference, "fast": FAST}[self.preset]
        chosen = {
            group: matmul if name == "matmul" else torch.promote_types(matmul, parse_dtype(name))
            for group, name in preset.items()
        }
        settings = {group: getattr(self, group) for group in PLACES[1:]}
        chosen |= {group: parse_dtype(name) for group, name in settings.items() if name is not None}
        for group, dtype in chosen.items():
            if dtype == torch.float16 and group in _NO_FP16:
                is_set = settings[group] is not None
                cause = (
                    f"precision.{group} = fp16"
                    if is_set
                    else f"precision.preset = {self.preset} with model.dtype = fp16"
                )
                where = "" if is_set else f" in {group.replace('_', ' ')}"
                remedy = "set bf16 or fp32" if is_set else f"set precision.{group} = bf16 or fp32"
                raise UserError(f"{cause}: {_NO_FP16[group]}{where}; {remedy}")
        return Precision(matmul=matmul, **chosen)

    def check_training(
        self,
        *,
        optimizer: str,
        in_8_bits: Sequence[str],
        fused_backward: bool,
        sharded: bool = False,
    ) -> None:
        """Refuse a dtype that a place of the training would not have.

        `in_8_bits` names the optimizers that keep their averages so. With `fused_backward`
        gradients of a single micro-batch are applied as they come.
        """
        if self.optimizer is not None and optimizer in in_8_bits:
            raise UserError(
                f"{argument('precision.optimizer')} = {self.optimizer}: {argument('optim.name')} = "
                f"{optimizer} stores its moments in 8 bits; remove this "
                f"setting, or set {argument('optim.name')} = adamw for moments in fp32"
            )
        if self.optimizer not in (None, "fp32"):
            raise UserError(
                f"{argument('precision.optimizer')} = {self.optimizer}: moments and updates are "
                f"fp32; remove this setting, or for less memory set {argument('optim.name')} = "
                f"{' or '.join(in_8_bits)}, which stores its moments in 8 bits"
            )
        if self.reduction not in (None, "fp32") and not sharded:
            raise UserError(
                f"{argument('precision.reduction')} = {self.reduction} is for gradients of weights "
                f"that ranks divide ({argument('ranks.shard')}), and here each rank has "
                "all weights; remove it"
            )
        if self.accumulation is not None and fused_backward:
            raise UserError(
                f"{argument('precision.accumulation')} = {self.accumulation} is for gradients "
                f"summed over micro-batches, but {argument('optim.fused_backward')} applies each "
                "gradient at once; remove one of the two"
            )


_OVERFLOWS = "values exceed 65504, the largest number in fp16"
_UNDERFLOWS = "gradients underflow in fp16 without a loss scaler"
_NO_FP16: Mapping[str, str] = {
    **dict.fromkeys(("norms", "modulation", "residual", "entry", "head"), _OVERFLOWS),
    **dict.fromkeys(
        ("rotary", "qk_norms", "time_mlp", "attention", "accumulation", "optimizer", "reduction"),
        _UNDERFLOWS,
    ),
}
"""Why a place cannot run in fp16. The timestep and rotary tables can, because they are bounded and
have no gradient."""


def precision_of(stage: "nn.Module | StagedModel") -> Precision:
    """The dtypes of a model, or of a stage of it."""
    precisions = (vars(module).get("precision") for module in stage.modules())
    return next(
        (precision for precision in precisions if isinstance(precision, Precision)), Precision()
    )


def set_precision(model: "nn.Module | StagedModel", precision: Precision) -> None:
    """Change the compute dtypes of a built model; its parameters keep theirs."""
    for module in model.modules():
        if isinstance(vars(module).get("precision"), Precision):
            module.precision = precision  # type: ignore[assignment]


def compute_fp32_in_fp32() -> None:
    """Have NVIDIA GPUs compute in fp32 what a `Precision` says is in fp32: disable TF32, and sums
    of matmuls in bf16 and fp16.

    TF32 keeps only ten bits of the mantissa. torch enables it for convolutions by default, which
    would round every latent, and any library may enable it for matmuls. Where cuBLAS divides a long
    sum among several blocks of threads, torch lets it add the parts in the matrices' own dtype.
    `BlockEngine` calls this before each forward and a command at its start; autograd's threads
    share it. It writes the older of torch's two interfaces first: where only the newer one is
    written, torch's own reads of the older one raise.
    """
    import torch

    torch.set_float32_matmul_precision("highest")
    cudnn: Any = torch.backends.cudnn
    cudnn.allow_tf32 = False
    # In the newer interface that is `none`, which inherits what somebody may have set for all
    # backends (torch.backends.fp32_precision).
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = (
        matmul.allow_fp16_reduced_precision_reduction
    ) = False
    matmul.allow_fp16_accumulation = False


@contextmanager
def autocast_disabled(device_type: str) -> Iterator[None]:
    """Disable an outer autocast, which would otherwise affect nn.Linear, adapters and the backward
    of every matmul."""
    import torch

    with torch.autocast(device_type, enabled=False), torch.autocast("cpu", enabled=False):
        yield
