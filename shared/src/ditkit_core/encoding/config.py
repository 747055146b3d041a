"""The sections `[prior]` and `[encode]` of a configuration; this module needs no torch."""

from dataclasses import dataclass
from typing import Literal

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError, argument


@dataclass(frozen=True, kw_only=True)
class PriorConfig:
    """The `[prior]` section: prior preservation, which keeps the model from forgetting the class of
    the trained subject. It is off unless folder, prompt or match_base is set."""

    folder: str = setting("", resume="refused", holds="path")
    """Folder of class images (or clips) and captions, in the format of data.folder. Empty means
    `prior` in the run folder if a prompt is set."""
    prompt: str = setting("", resume="refused")
    """Prompt for the class (`a photo of a dog`): the untrained model generates the images that the
    folder lacks."""
    images: int = setting(100, resume="refused")
    """Number of class images; only used with a prompt."""
    weight: float = setting(1.0, resume="stated")
    """Weight of the class in the loss, above 0."""
    match_base: float = setting(0.0, resume="stated")
    """Share of the steps, from 0 to below 1, whose target is the prediction of the base without the
    adapter. Their clips are those of the data, with prior.prompt as their caption, or the empty
    one. They need no class images, and take one more forward."""

    def __post_init__(self) -> None:
        if self.prompt and not self.prompt.strip():
            raise UserError(
                f"{argument('prior.prompt')} is blank; describe the class, such as 'a photo of a "
                f"dog'"
            )
        # it becomes the caption of each image, and captions must not contain one
        if "\0" in self.prompt:
            raise UserError(f"{argument('prior.prompt')} has a null byte; correct it")
        if not 1 <= self.images <= 100_000:
            raise UserError(
                f"{argument('prior.images')} = {self.images} is not between 1 and 100000; set 100"
            )
        if not 0 < self.weight <= 1000:
            raise UserError(
                f"{argument('prior.weight')} = {self.weight} is not above 0 and at most 1000; set "
                f"1, or remove [prior]"
            )
        if not 0 <= self.match_base < 1:
            raise UserError(
                f"{argument('prior.match_base')} = {self.match_base} must be a share of the steps, "
                f"from 0 to below 1; set 0.25"
            )
        if self.match_base and self.folder:
            raise UserError(
                f"{argument('prior.match_base')} needs no class images, and "
                f"{argument('prior.folder')} names some; leave one of the two out"
            )
        if self.weight != 1 and not (self.wanted or self.match_base):
            raise UserError(
                f"{argument('prior.weight')} = {self.weight} has no effect without "
                f"{argument('prior.folder')}, {argument('prior.prompt')} or "
                f"{argument('prior.match_base')}; set one of them"
            )
        if self.images != 100 and not self.class_prompt:
            raise UserError(
                f"{argument('prior.images')} = {self.images} needs {argument('prior.prompt')} to "
                f"generate them from, without {argument('prior.match_base')}; set it, or remove it"
            )

    @property
    def wanted(self) -> bool:
        """Whether class images are used."""
        return bool(self.folder or self.class_prompt)

    @property
    def class_prompt(self) -> str:
        """Prompt of the class images to generate; empty if none are."""
        return "" if self.match_base else self.prompt


@dataclass(frozen=True, kw_only=True)
class EncodeConfig:
    """The `[encode]` section: where encoded clips and captions are stored, and how they are
    computed."""

    cache: str = setting("", resume="free", holds="path")
    """Folder of encoded clips and captions, which runs may share. Empty means `cache` next to the
    run folder."""
    device: str = setting("auto", resume="free")
    """Device of the encoders: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`, …"""
    text_dtype: Literal["bf16", "fp32"] = setting("bf16", resume="refused")
    """Dtype of the text encoder."""
    vae_dtype: Literal["fp32", "bf16"] = setting("fp32", resume="refused")
    """Dtype in which the VAE encodes. `bf16` takes half of the memory, and on a GPU less time. Its
    latents are the training data, which differ then: by 0.5 to 1 % with the VAEs of the demos."""
    vae_tiling: bool = setting(False, resume="refused")
    """Encode overlapping tiles, which are blended, instead of whole images. This takes less memory
    and gives different latents."""
    streaming: Literal["auto", "always", "never"] = setting("auto", resume="free")
    """Whether a large text encoder is streamed from its files layer by layer, for many captions at
    once. `auto` streams if the whole encoder does not fit into memory."""
