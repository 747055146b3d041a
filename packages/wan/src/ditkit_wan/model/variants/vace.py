"""VACE: additional blocks whose results are hints for the main blocks. Source: Wan-Video/Wan2.1,
wan/modules/vace_model.py."""

from torch import nn

from ditkit_core.models.precision import Precision
from ditkit_core.nn.functional import plain_sum
from ditkit_core.nn.remat import carried_part, recompute_boundary
from ditkit_wan.model.block import WanBlock
from ditkit_wan.model.carry import VaceCarry, WanCarry
from ditkit_wan.presets import WanArch


class VaceBlock(WanBlock):
    """One step of VACE's stream, and the hint that it adds to the main stream.

    The official code runs all VACE blocks first and keeps their hints for the main blocks. Their
    stream depends on the main stream only by its tokens before the first block, which `embed` adds.
    So each VACE block can run right after the main block that its hint is added to: the numbers are
    the same, and no hint is carried. The last block hands its stream on as well, although no block
    reads it: under `attn_only` it is kept in any case, in place of the matmul that made it.
    """

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__(arch, precision)
        self.after_proj = nn.Linear(arch.dim, arch.dim)
        nn.init.zeros_(self.after_proj.weight)
        nn.init.zeros_(self.after_proj.bias)

    def forward(self, carry: WanCarry) -> WanCarry:
        assert carry.vace is not None, "embed makes the stream"
        stream = carried_part(self.advanced, carry.vace.stream, carry, name="stream")
        h = stream.to(self.precision.matmul)
        tokens = plain_sum(recompute_boundary(self.after_proj, h), carry.tokens)
        return carry._replace(tokens=tokens, vace=VaceCarry(stream))
