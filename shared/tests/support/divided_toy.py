"""A variant of the toy with what models in the wild have, and dividing upstream trips over: an
optional module of the embedding, a block between blocks with fields and tables of its own, tables
that are bare parameters, a second head."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ditkit_core.models.precision import Precision
from ditkit_core.models.protocol import Engine, run_plain
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, ToyBlock, ToyCarry, ToyEmbed, ToyHead, ToyInputs


class VariantCarry(NamedTuple):
    """The toy's carry, and what its additions hand on."""

    tokens: Float[Tensor, "batch tokens dim"]
    modulation: Float[Tensor, "batch 3 dim"]
    text: Float[Tensor, "batch text dim"]
    padding_mask: Tensor | None
    sizes: tuple[tuple[int, ...], ...]
    image: Float[Tensor, "batch 1 dim"]
    """From the optional module of the embedding."""
    music: Float[Tensor, "batch 1 dim"]
    """What every injector adds to, and the next one takes."""
    table: Float[Tensor, "positions dim"]
    """Angles by position: no parameter, no buffer; it travels."""


class VariantEmbed(ToyEmbed):
    """The toy's, with an image embedding that other variants lack."""

    def __init__(self, arch: ToyArch, precision: Precision):
        super().__init__(arch, precision)
        self.image = nn.Linear(arch.channels, arch.dim)

    def forward(self, inputs: ToyInputs) -> Any:
        carry = super().forward(inputs)
        means = torch.stack([latent.flatten(1).mean(1) for latent in inputs.latents])
        positions = torch.arange(carry.tokens.shape[1], device=carry.tokens.device)[:, None]
        steps = torch.arange(carry.tokens.shape[2], device=carry.tokens.device)
        table = torch.sin(positions / 10 ** (steps / len(steps)))
        image = self.image(means.to(carry.text.dtype))[:, None]
        return VariantCarry(*carry, image=image, music=torch.zeros_like(image), table=table)


class VariantBlock(ToyBlock):
    """The toy's, which attends to the image besides the text, and has a bare parameter without
    dimensions."""

    def __init__(self, arch: ToyArch, precision: Precision):
        super().__init__(arch, precision)
        self.strength = nn.Parameter(torch.ones(1))

    def forward(self, carry: Any) -> Any:
        plain = ToyCarry(*carry[: len(ToyCarry._fields)])
        text, tokens = torch.cat([carry.text, carry.image], 1), carry.tokens + carry.table
        return carry._replace(
            tokens=super().forward(plain._replace(text=text, tokens=tokens)).tokens * self.strength
        )


class Injector(nn.Module):
    """A block between blocks: it adds music to the tokens, and hands the music on changed."""

    def __init__(self, arch: ToyArch):
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.zeros(2, arch.dim))
        self.project = nn.Linear(arch.dim, arch.dim)

    def forward(self, carry: Any) -> Any:
        scale, shift = self.scale_shift_table
        music = self.project((carry.music + carry.image) * (1 + scale) + shift)
        return carry._replace(tokens=carry.tokens + music, music=music)


class TwoHeads(nn.Module):
    """The head, and one for the whole image."""

    def __init__(self, arch: ToyArch, precision: Precision):
        super().__init__()
        self.own, self.whole = ToyHead(arch, precision), nn.Linear(arch.dim, arch.channels)

    def forward(self, carry: Any) -> list[Tensor]:
        plain = ToyCarry(*carry[: len(ToyCarry._fields)])
        whole = self.whole(carry.tokens.mean(1) + carry.music[:, 0])
        return [
            out + row[:, None, None, None] for out, row in zip(self.own(plain), whole, strict=True)
        ]


class VariantModel(nn.Module):
    """embed → block, injector, block, a join without parameters, block, injector, block → head."""

    def __init__(self, arch: ToyArch, precision: Precision):
        super().__init__()
        self.embed = VariantEmbed(arch, precision)
        self.layers = nn.ModuleList(VariantBlock(arch, precision) for _ in range(arch.depth))
        self.injectors = nn.ModuleList(Injector(arch) for _ in range(arch.depth // 2))
        self.join = nn.Identity()
        self.head = TwoHeads(arch, precision)

    def blocks(self) -> list[nn.Module]:
        found: list[nn.Module] = []
        for index, layer in enumerate(self.layers):
            found += [layer] if index % 2 else [layer, self.injectors[index // 2]]
            found += [self.join] if index == 1 else []
        return found

    def forward(self, inputs: ToyInputs, engine: Engine = run_plain) -> list[Tensor]:
        return engine(self, inputs)


VARIANT = altered(TOY, build=VariantModel)
VARIANT_ARCH = ToyArch(dim=16, depth=4, dropout=0.1)
