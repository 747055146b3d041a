"""The sections `[flow]`, `[ema]`, `[train]`, `[save]` and `[held_out]` of a configuration; this
module needs no torch."""

from dataclasses import dataclass
from typing import Literal

from ditkit_core.config.field import setting
from ditkit_core.errors import UserError, argument
from ditkit_core.execution import StepExecution

ClipBy = Literal["step", "last_step", "block"]
"""Which norm `train.clip_norm` limits."""


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """The `[flow]` section: which noise levels are trained, and how the loss weighs each."""

    sampling: Literal["uniform", "logit_normal"] = setting("uniform", resume="stated")
    """Distribution of the noise level before it is shifted."""
    shifting: Literal["model", "none", "constant"] = setting("model", resume="stated")
    """Shift of the sampled level: the one that the model was trained with (which may depend on the
    resolution), none, or `shift`."""
    shift: float = setting(1.0, resume="stated")
    """For `constant`: sigma' = shift * sigma / (1 + (shift - 1) * sigma), above 0; more than 1
    moves towards noise."""
    logit_mean: float = setting(0.0, resume="stated")
    """For `logit_normal`: mean of logit(sigma); adding ln(s) is the same as a shift by s."""
    logit_std: float = setting(1.0, resume="stated")
    """For `logit_normal`: standard deviation of logit(sigma), above 0."""
    min_sigma: float = setting(0.0, resume="stated")
    """Lowest noise level that is sampled, in [0, 1)."""
    max_sigma: float = setting(1.0, resume="stated")
    """Highest noise level that is sampled, in (0, 1]."""
    guidance: float = setting(1.0, resume="stated")
    """Guidance that a guidance-embedded model is conditioned on in training. 1 trains the plain
    conditional velocity; a higher value when sampling then strengthens it."""
    weighting: Literal["none", "bell", "cosmap", "sigma_sqrt"] = setting("none", resume="stated")
    """Weight of a sample's loss by noise level: `bell` is highest at 0.5, 0 at 1 and 1 on average;
    `cosmap` is 2 / (pi * (1 - 2 sigma + 2 sigma^2)); `sigma_sqrt` is sigma^-2."""
    target_guidance: float = setting(1.0, resume="stated")
    """For bases that were distilled with guidance, such as the distilled klein: the guidance of the
    velocity to predict, at least 1. The target is then u + w (v - u): v is the sample's velocity, u
    the model's own prediction with the empty caption, w this guidance. It takes one more forward. 1
    trains the plain velocity, which has no guidance in it."""
    target_schedule: Literal["constant", "sigma"] = setting("constant", resume="stated")
    """For `target_guidance`: `sigma` lowers it with the noise level, to 1 + (target_guidance - 1)
    sigma, because what no model can predict is most of v - u at low levels."""
    slider_positive: str = setting("", resume="refused")
    """Prompt of one end of a slider, an adapter that moves pictures along one direction (`a photo
    of an old person`); empty trains none. The target is then u + w (p - n), at the mean and
    standard deviation of u, all predicted by the base without the adapter: u with the sample's
    caption, p with this prompt, n with `slider_negative`, w is `slider_guidance`. It takes three
    more forwards."""
    slider_negative: str = setting("", resume="refused")
    """Prompt of the slider's other end (`a photo of a young person`); empty means the empty
    caption."""
    slider_guidance: float = setting(3.0, resume="stated")
    """Guidance w from one end of the slider to the other that its adapter learns at strength 1,
    above 0."""
    stratified: bool = setting(False, resume="stated")
    """Spread the noise levels of a step: each of its n samples has its level in another one of n
    equally likely parts of the distribution, so that levels alone make the loss differ less from
    step to step. It needs several samples in a step."""

    def __post_init__(self) -> None:
        if self.shift <= 0 or self.logit_std <= 0:
            raise UserError(
                f"{argument('flow.shift')} = {self.shift} and {argument('flow.logit_std')} = "
                f"{self.logit_std} must be above 0"
            )
        if not 0 <= self.min_sigma < self.max_sigma <= 1:
            raise UserError(
                f"{argument('flow.min_sigma')} = {self.min_sigma} must be below "
                f"{argument('flow.max_sigma')} = {self.max_sigma}, both in [0, 1]"
            )
        if self.guidance < 0:
            raise UserError(
                f"{argument('flow.guidance')} = {self.guidance} must not be negative; 1 is usual"
            )
        if self.weighting == "sigma_sqrt" and self.min_sigma == 0:
            raise UserError(
                f"{argument('flow.weighting')} = sigma_sqrt grows without bound; set "
                f"{argument('flow.min_sigma')} above 0"
            )
        if (self.logit_mean, self.logit_std) != (0, 1) and self.sampling != "logit_normal":
            raise UserError(
                f"{argument('flow.logit_mean')} = {self.logit_mean} and "
                f"{argument('flow.logit_std')} = {self.logit_std} need {argument('flow.sampling')} "
                f"= "
                '"logit_normal"'
            )
        if self.target_guidance < 1:
            raise UserError(
                f"{argument('flow.target_guidance')} = {self.target_guidance} must be at least 1; "
                f"1 trains the plain velocity, and the peers' default is 3"
            )
        if self.target_schedule != "constant" and self.target_guidance == 1:
            raise UserError(
                f"{argument('flow.target_schedule')} = {self.target_schedule} has no effect with "
                f"{argument('flow.target_guidance')} = 1; set that above 1"
            )
        self._check_slider()
        if self.shift != 1 and self.shifting != "constant":
            raise UserError(
                f'{argument("flow.shift")} = {self.shift} needs {argument("flow.shifting")} = "constant"'
            )

    def _check_slider(self) -> None:
        positive, negative = self.slider_positive, self.slider_negative
        for key, prompt in (("slider_positive", positive), ("slider_negative", negative)):
            # captions must not contain a null byte
            if (prompt and not prompt.strip()) or "\0" in prompt:
                raise UserError(
                    f"{argument(f'flow.{key}')} is blank or has a null byte; describe one end of "
                    f"the slider"
                )
        if not positive and (negative or self.slider_guidance != 3):
            raise UserError(
                f"{argument('flow.slider_negative')} and {argument('flow.slider_guidance')} need "
                f"{argument('flow.slider_positive')}; set it to the prompt of the end at strength 1"
            )
        if positive and positive == negative:
            raise UserError(
                f"{argument('flow.slider_positive')} and {argument('flow.slider_negative')} are "
                "the same prompt, with no direction between them; change one"
            )
        if not self.slider_guidance > 0:
            raise UserError(
                f"{argument('flow.slider_guidance')} = {self.slider_guidance} must be above 0; "
                f"exchange the two prompts to turn the slider round"
            )
        if positive and self.target_guidance != 1:
            raise UserError(
                f"{argument('flow.slider_positive')} and {argument('flow.target_guidance')} = "
                f"{self.target_guidance} are two targets of one prediction; "
                "leave one of the two out"
            )

    def shift_for(self, model_shift: float) -> float:
        """The shift of a sample's noise level, given the one that its model was trained with."""
        return {"model": model_shift, "none": 1.0, "constant": self.shift}[self.shifting]


@dataclass(frozen=True, kw_only=True)
class EMAConfig:
    """The `[ema]` section: an average of the trained weights over the steps, which samples and
    exports use."""

    decay: float = setting(0.0, resume="stated")
    """Share of the average that one update keeps, in [0, 1); 0 disables averaging. 0.999 averages
    about a thousand updates."""
    update_every: int = setting(1, resume="stated")
    """Optimizer steps between two updates, at least 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1 or self.update_every < 1:
            raise UserError(
                f"{argument('ema.decay')} must be in [0, 1), {argument('ema.update_every')} at "
                f"least 1"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(StepExecution):
    """The `[train]` section: how long to train, in which batches, on which devices, and with how
    much memory."""

    steps: int = setting(1000, resume="free")
    """Optimizer steps of the whole run, including those before it was resumed. 0 trains nothing:
    the initial model is exported and sampled."""
    batch_size: int = setting(1, resume="stated")
    """Samples in a micro-batch. All have the same shape, so a micro-batch can be smaller if shapes
    differ."""
    batch_tokens: int = setting(0, resume="stated")
    """Tokens in a micro-batch, instead of batch_size: as many samples as fit, at least one. 0 uses
    batch_size."""
    accumulation: int = setting(1, resume="stated")
    """Micro-batches in an optimizer step."""
    clip_norm: float = setting(1.0, resume="stated")
    """Maximum gradient norm; larger gradients are scaled down. 0 disables clipping."""
    clip_by: ClipBy = setting("step", resume="stated")
    """The norm that clip_norm limits: `step`, the norm of all gradients of the step; `last_step`,
    the norm of the step before (the first step is not clipped); `block`, the norm of each block's
    own gradients (embedding and head count as blocks). optim.fused_backward needs one of the last
    two: it updates before the norm of the step is known."""
    seed: int = setting(0, resume="refused")
    """Seed of initial adapters, data order, noise and dropout."""
    caption_dropout: float = setting(0.0, resume="stated")
    """Share of samples whose caption is replaced by the empty one, in [0, 1]."""
    control_dropout: float = setting(-1.0, resume="stated")
    """Share of samples that are trained without their optional conditions (such as a first frame),
    in [0, 1]. -1 means the model's own: half of the samples if it generates from text alone as well
    as from an image (TI2V), else none."""
    mask_weight: float = setting(0.0, resume="stated")
    """Weight of the loss where a sample's mask is black, in [0, 1]; it is 1 where the mask is
    white, and between for grey. Samples without a mask (data.masks) have weight 1 everywhere."""
    profile: int = setting(0, resume="free")
    """Steps to trace after three steps of warm-up: profile.json.gz in the run folder shows what ran
    when, and the longest kernels are printed. 0 traces nothing."""
    threads: int = setting(0, resume="stated")
    """CPU threads of torch; 0 is torch's default. On a CPU the last bits of sums depend on it."""
    sentinels: int = setting(50, resume="free")
    """Optimizer steps between two checks of activations and gradients, the first step included, for
    metrics.jsonl: the largest activation of each block and its drift, values that are not finite,
    gradients that underflow. 0 disables the checks."""

    def __post_init__(self) -> None:
        if self.sentinels < 0:
            raise UserError(
                f"{argument('train.sentinels')} = {self.sentinels} must be steps between two "
                f"checks, or 0 for none"
            )
        for name, least in {
            "batch_size": 1,
            "accumulation": 1,
            "steps": 0,
            "clip_norm": 0,
            "threads": 0,
            "profile": 0,
        }.items():
            # `not … >=` also refuses NaN, which compares false.
            if not getattr(self, name) >= least:
                raise UserError(
                    f"{argument(f'train.{name}')} = {getattr(self, name)} must be at least {least}"
                )
        if self.batch_tokens < 0:
            raise UserError(
                f"{argument('train.batch_tokens')} = {self.batch_tokens} must be at least 0, which "
                f"uses {argument('train.batch_size')}"
            )
        if self.batch_tokens and self.batch_size != 1:
            raise UserError(
                f"{argument('train.batch_tokens')} = {self.batch_tokens} takes the place of "
                f"{argument('train.batch_size')} = {self.batch_size}; leave one of them out"
            )
        if self.threads > 256:
            raise UserError(
                f"{argument('train.threads')} = {self.threads}: torch would start as many; give "
                f"the number of cores, or 0"
            )
        super().__post_init__()
        for name in ("caption_dropout", "mask_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(
                    f"{argument(f'train.{name}')} = {getattr(self, name)} must be in [0, 1]"
                )
        if not 0 <= self.control_dropout <= 1 and self.control_dropout != -1:
            raise UserError(
                f"{argument('train.control_dropout')} = {self.control_dropout} must be in [0, 1], "
                f"or -1 for the model's own"
            )


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """The `[save]` section. A run saves at its end and when it is interrupted, whatever is set
    here."""

    every_steps: int = setting(0, resume="free")
    """Optimizer steps between two saves; 0 does not save by steps."""
    every_minutes: float = setting(30.0, resume="free")
    """Minutes between two saves; 0 does not save by time."""
    keep_last: int = setting(2, resume="free")
    """Number of newest saves to keep, at least 1. With 2, a run survives damage to one of them."""
    keep_best: int = setting(1, resume="free")
    """Number of saves with the lowest validation loss to keep in addition; needs held_out.clips."""

    def __post_init__(self) -> None:
        if (
            self.every_steps < 0
            or self.every_minutes < 0
            or self.keep_last < 1
            or self.keep_best < 0
        ):
            raise UserError(
                f"{argument('save.keep_last')} must be at least 1, the other keys of [save] at "
                f"least 0"
            )

    def due(self, step: int, seconds_since_save: float) -> bool:
        """Whether to save after `step` optimizer steps."""
        by_step = self.every_steps > 0 and step % self.every_steps == 0
        return by_step or 0 < self.every_minutes * 60 <= seconds_since_save


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig:
    """The `[held_out]` section: validation, which is the loss on clips that are not trained on."""

    clips: int = setting(0, resume="refused")
    """Number of clips for validation, which are not trained on; it can become more, because all
    windows of a file stay together. 0 disables validation."""
    sigmas: tuple[float, ...] = setting((0.1, 0.3, 0.5, 0.7, 0.9), resume="refused")
    """Noise levels at which each clip is measured, in [0, 1]."""
    every_steps: int = setting(0, resume="free")
    """Optimizer steps between two validations; 0 validates at each scheduled save. A run always
    validates before and after training."""

    def __post_init__(self) -> None:
        if self.clips < 0 or self.every_steps < 0:
            raise UserError(
                f"{argument('held_out.clips')} and {argument('held_out.every_steps')} must be at "
                f"least 0"
            )
        if not self.sigmas or not all(0 <= sigma <= 1 for sigma in self.sigmas):
            raise UserError(
                f"{argument('held_out.sigmas')} = {list(self.sigmas)} must be noise levels in [0, "
                f"1], at least one"
            )
        if len({f"{sigma:g}" for sigma in self.sigmas}) < len(self.sigmas):
            raise UserError(
                f"{argument('held_out.sigmas')} = {list(self.sigmas)} has a noise level twice, to "
                f"six digits; leave one of them out"
            )

    def due(self, step: int, *, saving: bool) -> bool:
        """Whether to validate after `step` optimizer steps, given whether the run saves there."""
        return step % self.every_steps == 0 if self.every_steps else saving
