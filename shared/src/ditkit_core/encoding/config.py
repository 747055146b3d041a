"""The sections `[prior]` and `[encode]` of a configuration; this module needs no torch."""

from dataclasses import dataclass
from typing import Literal

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class PriorConfig:
    """The `[prior]` section: images of the class that the trained subject belongs to. Without folder and prompt there are none."""

    folder: str = setting("", resume="refused", holds="path")
    """Folder of class images (or clips) and captions, in the format of data.folder. Empty means `prior` in the run folder if a prompt
    is set."""
    prompt: str = setting("", resume="refused")
    """Prompt for the class (`a photo of a dog`): the untrained model generates the images that the folder lacks."""
    images: int = setting(100, resume="refused")
    """Number of class images; only used with a prompt."""
    weight: float = setting(1.0, resume="stated")
    """Weight of the class in the loss, above 0."""

    def __post_init__(self) -> None:
        if self.prompt and not self.prompt.strip():
            raise UserError("prior.prompt is blank; describe the class, such as 'a photo of a dog'")
        if "\0" in self.prompt:  # it becomes the caption of each image, and captions must not contain one
            raise UserError("prior.prompt has a null byte; correct it")
        if not 1 <= self.images <= 100_000:
            raise UserError(f"prior.images = {self.images} is not between 1 and 100000; set 100")
        if not 0 < self.weight <= 1000:
            raise UserError(f"prior.weight = {self.weight} is not above 0 and at most 1000; set 1, or remove [prior]")
        if self.weight != 1 and not self.wanted:
            raise UserError(
                f"prior.weight = {self.weight} has no effect without prior.folder or prior.prompt; set one of them"
            )
        if self.images != 100 and not self.prompt:
            raise UserError(
                f"prior.images = {self.images} needs prior.prompt to generate them from; set it, or remove it"
            )

    @property
    def wanted(self) -> bool:
        """Whether class images are used."""
        return bool(self.folder or self.prompt)


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """The `[encode]` section: where encoded clips and captions are stored, and how they are computed.

    The VAE runs in fp32: its latents are the training data, so rounding them would affect every step.
    """

    cache: str = setting("", resume="free", holds="path")
    """Folder of encoded clips and captions, which runs may share. Empty means `cache` next to the run folder."""
    device: str = setting("auto", resume="free")
    """Device of the encoders: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, …"""
    text_dtype: Literal["bf16", "fp32"] = setting("bf16", resume="refused")
    """Dtype of the text encoder."""
    vae_tiling: bool = setting(False, resume="refused")
    """Encode overlapping tiles, which are blended, instead of whole images. This takes less memory and gives different latents."""
    streaming: Literal["auto", "always", "never"] = setting("auto", resume="free")
    """Whether a large text encoder is streamed from its files layer by layer, for many captions at once. `auto` streams if the whole
    encoder does not fit into memory."""
