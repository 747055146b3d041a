"""The embedding of the FLUX.2 transformer: inputs to the first carry.

Modulation is computed once and shared by all blocks of a kind. It is one tensor per kind, which
each block splits: a reentrant checkpoint does not detach tensors inside a tuple, and its recompute
would then run backward through the graph that all blocks share.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ditkit_core.models.precision import Precision
from ditkit_core.nn.linear import CastLinear
from ditkit_core.nn.padding import padding_mask
from ditkit_core.nn.rope import rotary_table, timestep_features
from ditkit_flux2.model.carry import Flux2DoubleCarry
from ditkit_flux2.model.inputs import Flux2Inputs
from ditkit_flux2.model.rope import Grid, rotary_angles, token_positions
from ditkit_flux2.presets import Flux2Arch


class Flux2MlpEmbedder(nn.Module):
    """One number from 0 to 1 per sample, embedded to the model's width."""

    def __init__(self, arch: Flux2Arch):
        super().__init__()
        self.freq_dim = arch.freq_dim
        self.in_layer = CastLinear(arch.freq_dim, arch.dim, bias=False)
        self.out_layer = CastLinear(arch.dim, arch.dim, bias=False)

    def forward(
        self, x: Float[Tensor, " batch"], precision: Precision
    ) -> Float[Tensor, "batch dim"]:
        dtype = precision.timestep
        features = timestep_features(1000 * x.to(dtype), self.freq_dim, dtype).to(
            precision.time_mlp
        )
        return self.out_layer(F.silu(self.in_layer(features)))


class Flux2Modulation(nn.Module):
    """Shift, scale and gate, once or twice, for all blocks of a kind."""

    def __init__(self, arch: Flux2Arch, rows: int):
        super().__init__()
        self.rows = rows
        self.lin = CastLinear(arch.dim, rows * arch.dim, bias=False)

    def forward(self, time: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch rows dim"]:
        """Modulation rows, in the dtype of `time`."""
        return self.lin(F.silu(time)).unflatten(-1, (self.rows, -1))


class Flux2Embed(nn.Module):
    """Inputs to the carry."""

    def __init__(self, arch: Flux2Arch, precision: Precision):
        super().__init__()
        self.arch, self.precision = arch, precision
        self.img_in = nn.Linear(arch.in_channels, arch.dim, bias=False)
        self.txt_in = nn.Linear(arch.text_dim, arch.dim, bias=False)
        self.time_in = Flux2MlpEmbedder(arch)
        self.guidance_in = Flux2MlpEmbedder(arch) if arch.guidance else None
        self.double_stream_modulation_img = Flux2Modulation(arch, 6)
        self.double_stream_modulation_txt = Flux2Modulation(arch, 6)
        self.single_stream_modulation = Flux2Modulation(arch, 3)

    def forward(self, inputs: Flux2Inputs) -> Flux2DoubleCarry:
        precision = self.precision
        images = [
            (latent, *others)
            for latent, others in zip(inputs.latents, inputs.references, strict=True)
        ]
        rows = [
            torch.cat([rearrange(one, "c 1 h w -> (h w) c") for one in group]) for group in images
        ]
        image = self.img_in(pad_sequence(rows, batch_first=True).to(precision.matmul)).to(
            precision.entry
        )
        assert all(len(text) == self.arch.text_tokens for text in inputs.text)
        text = self.txt_in(torch.stack(list(inputs.text)).to(precision.matmul)).to(precision.entry)
        layouts = [tuple((one.shape[2], one.shape[3]) for one in group) for group in images]
        # One table serves the whole batch where all samples share a layout: it is broadcast instead
        # of stored per sample.
        table = self._angles(layouts if len(set(layouts)) > 1 else layouts[:1], image.device)
        time = self.time_in(inputs.sigma, precision)
        if self.guidance_in is not None:
            assert inputs.guidance is not None, "this model takes a guidance scale"
            time = time + self.guidance_in(inputs.guidance, precision)
        modulating = time.to(precision.modulation)
        return Flux2DoubleCarry(
            image=image,
            text=text,
            image_modulation=self.double_stream_modulation_img(modulating),
            text_modulation=self.double_stream_modulation_txt(modulating),
            single_modulation=self.single_stream_modulation(modulating),
            time=time,
            rotary=rotary_table(table, precision.rotary_tables),
            padding_mask=padding_mask(
                [self.arch.text_tokens + len(row) for row in rows], image.device
            ),
            grids=tuple(layout[0] for layout in layouts),
        )

    def _angles(
        self, layouts: Sequence[tuple[Grid, ...]], device: torch.device
    ) -> Float[Tensor, "tables tokens 1 pairs"]:
        """Angles of each layout (target, then references); 0 on padding, which stays unrotated."""
        arch = self.arch
        positions = [
            token_positions(arch.text_tokens, target, others, device) for target, *others in layouts
        ]
        angles = [rotary_angles(position, arch.axes, arch.theta) for position in positions]
        return pad_sequence(angles, batch_first=True)[:, :, None]
