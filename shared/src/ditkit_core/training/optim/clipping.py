"""Which norm limits the gradients of a step: the norm of all of them, the norm of the step before,
or each block's own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor, nn

from ditkit_core.models.protocol import StagedModel
from ditkit_core.training.config import ClipBy

_EPSILON = 1e-6
"""As torch adds it to the norm that it divides by."""


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """How the gradients of one step are clipped."""

    max_norm: float = 0.0
    """`train.clip_norm`; 0 clips nothing."""
    by: ClipBy = "step"
    last_norm: float | None = None
    """Norm of all gradients of the step before, as it was before they were clipped; None before the
    first step, which `last_step` does not clip."""
    stage_of: Mapping[str, int] = field(default_factory=dict)
    """The block of each trained parameter, or the embedding or head, by number; for `block`."""

    @property
    def known_factor(self) -> float | None:
        """The factor that is known before the backward; None if gradients stay as they are, or if
        only their own norm decides it."""
        if not self.max_norm or self.by != "last_step" or self.last_norm is None:
            return None
        factor = self.max_norm / (self.last_norm + _EPSILON)
        return factor if factor < 1 else None

    @property
    def by_stage(self) -> bool:
        """Whether each stage's gradients wait for each other, because their norm decides."""
        return bool(self.max_norm) and self.by == "block"

    def factor(self, norms: Sequence[Tensor]) -> Tensor:
        """The factor for a stage's gradients from the norm of each, on the device of the first."""
        return (self.max_norm / (joined_norm(norms) + _EPSILON)).clamp(max=1.0)

    def apply(self, parameters: Mapping[str, nn.Parameter], norm: Tensor) -> None:
        """Clip gradients in place that exist all at once.

        Args:
            parameters: The trained parameters, by name.
            norm: Of all gradients.
        """
        if self.max_norm and self.by == "step":
            torch.nn.utils.clip_grads_with_norm_(parameters.values(), self.max_norm, norm)
        elif self.by_stage:
            for stage in dict.fromkeys(self.stage_of[name] for name in parameters):
                self._scale([p for name, p in parameters.items() if self.stage_of[name] == stage])
        elif (factor := self.known_factor) is not None:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _scale(self, parameters: Iterable[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            factor = self.factor([norm_of(gradient) for gradient in gradients])
            for gradient in gradients:
                gradient.mul_(factor.to(gradient.device))


def stages_of(model: StagedModel, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """The stage of each trained parameter: 0 for the embedding, then the blocks in order, then the
    head."""
    stages = [model.embed, *model.blocks(), model.head]
    stage_by_id = {
        id(parameter): number
        for number, stage in enumerate(stages)
        for parameter in stage.parameters()
    }
    return {name: stage_by_id[id(parameter)] for name, parameter in parameters.items()}


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of one gradient, in fp32 or wider, as `total_norm` computes it."""
    return torch._foreach_norm(
        [gradient], dtype=torch.promote_types(gradient.dtype, torch.float32)
    )[0]


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, on the device of the first.

    It sums in the given order, whatever devices the gradients are on. torch's own function groups
    them by device, which would change the last bits for a split model.
    """
    norms: list[Tensor] = [torch.empty(0)] * len(gradients)
    # Otherwise the norm of a bf16 gradient (precision.accumulation) is rounded to bf16.
    dtype = reduce(torch.promote_types, (gradient.dtype for gradient in gradients), torch.float32)
    for chosen in _by_device(gradients).values():
        device_norms = torch._foreach_norm([gradients[index] for index in chosen], dtype=dtype)
        for index, norm in zip(chosen, device_norms, strict=True):
            norms[index] = norm
    return joined_norm(norms)


def joined_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of several tensors from their norms, scalars on any devices; on the device of the
    first.

    Nothing is sent from the host if all are on one device: a GPU would be waited for, with
    `train.clip_by = block` once for each block.
    """
    first, indices = norms[0], _by_device(norms)
    dtype = torch.promote_types(first.dtype, torch.float32)
    if len(indices) == 1:
        return torch.linalg.vector_norm(torch.stack(list(norms)).to(dtype))
    joined = torch.zeros(len(norms), device=first.device, dtype=dtype)
    for chosen in indices.values():
        gathered = torch.stack([norms[index] for index in chosen])  # one transfer from each device
        joined[torch.tensor(chosen, device="cpu").to(joined.device)] = gathered.to(joined)
    return torch.linalg.vector_norm(joined)


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    indices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(index)
    return indices
