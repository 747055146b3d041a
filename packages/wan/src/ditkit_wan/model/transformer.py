"""The Wan 2.x transformer as embed → blocks → head.

Names follow Wan-Video/Wan2.1, wan/modules/model.py; `state_dict.py` has the few that differ.
Single-device code: no device, no autocast, no checkpointing in here. Each operation casts to its
dtype in `Precision` (timestep, modulation, norms, rotation, residual stream, head, …), and none
takes its dtype from the tensor before it.
"""

from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_wan.model.block import WanBlock
from ditkit_wan.model.embed import WanEmbed
from ditkit_wan.model.head import WanHead
from ditkit_wan.model.inputs import WanInputs
from ditkit_wan.model.variants.animate import FaceBlock
from ditkit_wan.model.variants.dance import MusicBlock, SkippedBlock
from ditkit_wan.model.variants.speech import SpeechBlock
from ditkit_wan.model.variants.vace import VaceBlock
from ditkit_wan.presets import WanArch


class WanTransformer(nn.Module):
    """A StagedModel: velocity of each sample from its noised latents, timestep, text and the
    variant's other conditions."""

    def __init__(self, arch: WanArch, precision: Precision):
        super().__init__()
        self.embed = WanEmbed(arch, precision)
        kinds: dict[int, type[WanBlock]] = {}
        if arch.music:
            kinds = {arch.music.skipped: SkippedBlock} | dict.fromkeys(
                arch.music.layers, MusicBlock
            )
        if arch.speech:
            kinds = dict.fromkeys(arch.speech.layers, SpeechBlock)
        if arch.animate:
            kinds = dict.fromkeys(arch.animate.layers, FaceBlock)
        self.layers = nn.ModuleList(
            kinds.get(index, WanBlock)(arch, precision) for index in range(arch.layers)
        )
        self.vace_blocks = nn.ModuleList(VaceBlock(arch, precision) for _ in arch.vace_layers)
        self.head = WanHead(arch, precision)

    def blocks(self) -> list[nn.Module]:
        # VACE's blocks run right after the blocks that they add their hints to; `VaceBlock` says
        # why that changes no number.
        after = dict(zip(self.embed.arch.vace_layers, self.vace_blocks, strict=True))
        blocks: list[nn.Module] = []
        for index, layer in enumerate(self.layers):
            blocks += [layer, after[index]] if index in after else [layer]
        return blocks

    def forward(self, inputs: WanInputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)
