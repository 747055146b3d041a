"""Which dtype an operation runs in, written down once and cast explicitly everywhere.

There is no autocast inside ditkit: the engine disables an outer one at the seam, and models cast where they mean to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

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


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes a model computes in.

    A model takes its matmul dtype from here, never from a tensor that happens to be at hand: the residual stream is
    wider than the matmuls, and a quantized weight has a dtype of its own.
    """

    matmul: torch.dtype = torch.bfloat16
    """Linear layers of the blocks and attention."""

    @property
    def island(self) -> torch.dtype:
        """Timestep features, modulation, norms, rotary tables, residual stream and head: fp32, or wider if matmuls are."""
        return torch.promote_types(self.matmul, torch.float32)


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
