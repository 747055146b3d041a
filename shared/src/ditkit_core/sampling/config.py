"""The section `[sample]` of a configuration; this module needs no torch."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError, argument

if TYPE_CHECKING:
    from ditkit_core.models.spec import DataSpec, SampleDefaults

AUTHORS_NEGATIVE = "default"
"""`sample.negative` for the negative prompt of the model's authors."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The `[sample]` section: the samples that are generated when training ends, and by the sample
    command."""

    prompts: tuple[str, ...] = setting((), resume="free")
    """Prompts to sample. If empty, the captions of the first `captions` samples are used, with
    their own references."""
    num_control_prompts: int = setting(0, resume="free")
    """How many of `prompts`, counted from the last, are controls: of what the run does not teach,
    so that their samples should stay as they were. The report marks them, if there are other
    prompts as well."""
    captions: int = setting(2, resume="free")
    """Number of the dataset's captions to sample when there are no prompts; 0 generates no
    samples."""
    references: tuple[str, ...] = setting((), resume="free", holds="path")
    """Images to edit; every prompt is sampled with all of them."""
    controls: tuple[str, ...] = setting((), resume="free", holds="path")
    """Extra conditions of every prompt, as column=path: `input_image=cat.png` for a model that
    starts from an image. Without prompts, each caption is sampled with the conditions of its own
    clip."""
    adapter: tuple[str, ...] = setting((), resume="free", holds="path")
    """Additional LoRA files for samples and previews, each as `FILE` or `FILE@strength`. With a
    distilled one, few `steps` and `guidance = 1` are enough. Training, exports and class images do
    not use them. For a model of two experts: the files of the high-noise expert."""
    adapter_low: tuple[str, ...] = setting((), resume="free", holds="path")
    """The same for the low-noise expert. Name a file for both experts in both keys."""
    images: int = setting(1, resume="free")
    """Number of samples per prompt, with the seeds `seed`, `seed` + 1, …; more than one image is
    also shown in a grid."""
    negative: str = setting(AUTHORS_NEGATIVE, resume="free")
    """Negative prompt of classifier-free guidance, used with a guidance above 1. `default` is that
    of the model's authors, where they have one; empty is the empty text."""
    guidance: float = setting(0.0, resume="free")
    """Guidance strength; 1 turns guidance off (classifier-free guidance takes twice the time), 0
    means the model's default."""
    steps: int = setting(0, resume="free")
    """Steps of the scheduler; 0 means the model's default."""
    shift: float = setting(0.0, resume="free")
    """Noise-level shift of the scheduler; 0 means the default of the model or its checkpoint."""
    frames: int = setting(0, resume="free")
    """Frames per sample; 0 means as many as in training, 1 writes a PNG. Condition videos must have
    as many frames."""
    height: int = setting(0, resume="free")
    """Height in pixels; 0 means the height in training. If height and width are 0, a sample with
    references gets the shape of the first one, or of the last one where the model's own pipeline
    does so."""
    width: int = setting(0, resume="free")
    """Width in pixels; 0 works as for the height."""
    seed: int = setting(0, resume="free")
    """Seed of the initial noise."""
    vae_dtype: Literal["auto", "fp32", "bf16"] = setting("auto", resume="free")
    """Dtype that the VAE decodes in. `auto` is fp32, and bf16 where a GPU has no room for that:
    half of the memory, for a small difference."""
    vae_tiling: bool = setting(False, resume="free")
    """Whether the VAE always decodes overlapping tiles and blends them, where seams may be visible.
    Otherwise it does so only where a GPU has no room for a whole sample."""
    every_steps: int = setting(0, resume="free")
    """Optimizer steps between two previews, which sample the same prompts during training, the
    first before it starts. 0 samples at the end only."""
    device: str = setting("", resume="free")
    """Device that generates previews in a separate process while training continues: `cuda:1`, a
    device that does not train, or `cpu`. Empty generates them on the devices that train, and
    training waits."""

    def __post_init__(self) -> None:
        least = {"images": 1} | dict.fromkeys(
            (
                "captions",
                "num_control_prompts",
                "steps",
                "guidance",
                "shift",
                "frames",
                "height",
                "width",
                "every_steps",
            ),
            0,
        )
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise UserError(
                    f"{argument(f'sample.{name}')} = {getattr(self, name)} must be at least {value}"
                )

        if not re.fullmatch("|cpu|cuda(:[0-9]{1,3})?", self.device, re.ASCII):
            raise UserError(
                f"{argument('sample.device')} = {self.device!r} must be a device that does not "
                f"train, such as cuda:1, or cpu; if it is empty, previews "
                "are generated on the devices that train"
            )

        if not abs(self.seed) < 2**62:  # torch's generators take 64 bits; each image adds to it
            raise UserError(
                f"{argument('sample.seed')} = {self.seed} is too large, 2**62 or more; set 0"
            )

    def check(self, data: "DataSpec") -> None:
        """Refuse settings that the model cannot sample with; `data` has the sizes that it takes."""
        frame_step, size_step = data.frame_step, data.size_step
        if not frame_step and self.frames > 1:
            raise UserError(
                f"{argument('sample.frames')} = {self.frames}: this model generates images; set 1, "
                f"or 0"
            )
        if frame_step and self.frames and (self.frames - 1) % frame_step:
            near = max(1, round((self.frames - 1) / frame_step) * frame_step + 1)
            raise UserError(
                f"{argument('sample.frames')} = {self.frames}: frames are 1 + a multiple of "
                f"{frame_step}; try {near}"
            )
        # Refused and not rounded: a sample of another size than asked for would go unnoticed.
        for key, size in (("height", self.height), ("width", self.width)):
            if size % size_step:
                near = max(size_step, round(size / size_step) * size_step)
                raise UserError(
                    f"{argument(f'sample.{key}')} = {size} must be a multiple of {size_step}; try "
                    f"{near}"
                )
        if self.references and data.reference_size is None:
            raise UserError(
                f"{argument('sample.references')}: this model takes no reference images; leave it "
                f"empty"
            )
        if self.prompts and not self.references and data.needs_references:
            raise UserError(
                f"{argument('sample.prompts')}: this model edits images and there is none; name "
                f"images in {argument('sample.references')}"
            )

    def resolved(self, defaults: "SampleDefaults", warn: Callable[[str], None]) -> "SampleConfig":
        """The section with the model's defaults for unset values; `warn` gets one line for each
        setting that this model does not use."""
        guidance = self.guidance or defaults.guidance
        if defaults.guided_by == "nothing" and guidance != defaults.guidance:
            warn(
                f"sample.guidance = {self.guidance:g} is not used: this model is distilled, and "
                f"samples without guidance"
            )
            guidance = defaults.guidance
        is_set = self.negative != AUTHORS_NEGATIVE
        if defaults.guided_by != "negative" and is_set and self.negative:
            warn(
                "sample.negative is not used: this model is not guided by a negative prompt; leave "
                "it empty"
            )
        negative = self.negative if is_set else defaults.negative
        return replace(
            self,
            steps=self.steps or defaults.steps,
            shift=self.shift or defaults.shift,
            guidance=guidance,
            negative=negative,
        )

    @property
    def most_samples(self) -> int:
        """Samples of a preview, at most: a dataset may have fewer captions."""
        return (len(self.prompts) or self.captions) * self.images

    @property
    def preview_steps(self) -> int:
        """Optimizer steps between two previews; 0 if there are none, also where neither a prompt
        nor a caption is sampled."""
        return self.every_steps if self.prompts or self.captions else 0

    @property
    def without_adapters(self) -> "SampleConfig":
        """The section without its adapters, and without the steps and the guidance that are for
        them."""
        if not self.adapter and not self.adapter_low:
            return self
        return replace(self, adapter=(), adapter_low=(), steps=0, guidance=0.0)

    def uses_negative(self, defaults: "SampleDefaults") -> bool:
        """Whether sampling also calls the model with the negative prompt; the section must be
        resolved."""
        return defaults.guided_by == "negative" and self.guidance > 1
