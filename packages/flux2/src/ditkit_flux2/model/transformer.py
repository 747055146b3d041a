"""The FLUX.2 transformer as embed → double blocks → join → single blocks → head.

Names follow black-forest-labs/flux2, src/flux2/model.py; `state_dict.py` has the few that differ.
Single-device code: no device, no autocast, no checkpointing in here. Each operation casts to its
dtype in `Precision` (timestep, modulation, norms, rotation, both residual streams, head, …), and
none takes its dtype from the tensor before it.
"""

from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_flux2.model.block import Flux2DoubleBlock, Flux2Join, Flux2SingleBlock
from ditkit_flux2.model.embed import Flux2Embed
from ditkit_flux2.model.head import Flux2Head
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.presets import Flux2Arch


class Flux2Transformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, noise level, text and
    references."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.embed = Flux2Embed(arch, precision)
        self.double_blocks = nn.ModuleList(
            Flux2DoubleBlock(arch, precision) for _ in range(arch.double_layers)
        )
        self.join = Flux2Join()
        self.single_blocks = nn.ModuleList(
            Flux2SingleBlock(arch, precision) for _ in range(arch.single_layers)
        )
        self.head = Flux2Head(arch, precision)

    def blocks(self) -> list[nn.Module]:
        return [*self.double_blocks, self.join, *self.single_blocks]

    def forward(self, inputs: Flux2Inputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
