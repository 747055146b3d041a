"""LTX-Video as plain values and functions: everything the core needs to train it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from ditkit_core.families.euler import linear_shift, shifted_levels
from ditkit_core.families.first_frame import INPUT_IMAGE, FirstFrame, Outlined, first_frame_mask
from ditkit_core.families.spec import family_spec
from ditkit_core.families.t5 import T5Encoding
from ditkit_core.families.vae import DiffusersVae
from ditkit_core.models.conditions import Conditioner
from ditkit_core.models.encoders import VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    ModelSpec,
    PrecisionSpec,
    SampleDefaults,
    op_groups_by_name,
)
from ditkit_ltx.encoders import CAUSAL_TEXT, FPS, TEXT, VAE, Seconds, seconds_of
from ditkit_ltx.model import TOKEN_STREAMS, LtxTransformer, make_inputs
from ditkit_ltx.presets import HUB_PRESETS, PRESETS, LtxArch, arch_from_config
from ditkit_ltx.sampling import FirstFrameSampler
from ditkit_ltx.state_dict import NAMES, RULES, check_adapter

# The operation group that a parameter computes in, by the start of its name, then by the end; all
# others compute in the matmuls' group.
_STARTS = {
    "embed.time_embed.linear.": "modulation",
    "embed.time_embed.": "time_mlp",
    "head.": "head",
}
_ENDS = {
    ".scale_shift_table": "modulation",
    ".norm_q.weight": "qk_norms",
    ".norm_k.weight": "qk_norms",
}

# As diffusers runs in bf16: everything except norms, the sinusoid of the noise level, rotary tables
# and rotation.
_REFERENCE = {
    "timestep": "fp32",
    **dict.fromkeys(("modulation", "residual", "time_mlp", "head"), "matmul"),
}

_ATTENTION = tuple(
    f"{attn}.to_{part}" for attn in ("attn1", "attn2") for part in ("q", "k", "v", "out.0")
)

_FEW, _MANY = (1024, 0.95), (4096, 2.05)
"""(tokens, mu) of the two ends of the line that noise levels are shifted along. Source: the
published `scheduler_config.json`, and LTX-Video's own scheduler."""
_shift = partial(linear_shift, few=_FEW, many=_MANY)
_TERMINAL = 0.1
"""The last noise level above 0 when sampling with the models up to 0.9.1."""
_THRESHOLD = 0.025
"""How far the noise falls in the first half of the steps when sampling with later models."""

_DISTILLED = (1.0, 0.993, 0.987, 0.981, 0.975, 0.909, 0.725, 3e-5, 0.0)
"""Noise levels that the distilled model is sampled at, and the end."""
_FIRST_FRAME_NOISE = 0.15
"""Noise of a first frame at noise level 1, when sampling with later models: `image_cond_noise_scale`
of diffusers' `LTXConditionPipeline`."""


def terminal_levels(tokens: int, steps: int, shift: float) -> Float64[Tensor, " levels"]:
    """Shifted noise levels, stretched so that the last one above 0 is 0.1.

    Source: `stretch_shift_to_terminal` of diffusers' `FlowMatchEulerDiscreteScheduler`.
    """
    return shifted_levels(steps, shift or _shift(tokens), _TERMINAL)


def linear_quadratic_levels(tokens: int, steps: int, shift: float) -> Float64[Tensor, " levels"]:
    """Noise levels that fall by 0.025 in the first half of the steps, evenly, and to 0 in the
    second, along a parabola that begins with the same slope.

    Source: `linear_quadratic_schedule` of diffusers' `LTXConditionPipeline`. A `shift` other than 0
    moves them towards noise.
    """
    if steps < 2:
        return shifted_levels(steps, 1.0)
    half = steps // 2
    slope, left = _THRESHOLD / half, steps - half
    index = torch.arange(steps + 1, dtype=torch.float64)
    after = (index - half).clamp(min=0)
    levels = 1 - slope * index - (1 - slope * steps) / left**2 * after**2
    shift = shift or 1.0
    return shift * levels / (1 + (shift - 1) * levels)


def distilled_levels(tokens: int, steps: int, shift: float) -> Float64[Tensor, " levels"]:
    """Noise levels of the distilled model, which was made for eight steps; other numbers of steps
    go along the line through these levels.

    Source: the page of LTX-Video in diffusers' documentation. A `shift` other than 0 moves them
    towards noise.
    """
    index = torch.linspace(0, len(_DISTILLED) - 1, steps + 1, dtype=torch.float64)
    before = index.long().clamp(max=len(_DISTILLED) - 2)
    authors = torch.tensor(_DISTILLED, dtype=torch.float64)
    levels = torch.lerp(authors[before], authors[before + 1], index - before)
    shift = shift or 1.0
    return shift * levels / (1 + (shift - 1) * levels)


def _training_advice(arch: LtxArch) -> str:
    if not arch.distilled:
        return ""
    return (
        "the distilled LTX-Video has a few steps and trains poorly; train the base model instead "
        '(model.preset = "13b") and sample with the adapter on either, set base.assistant to a LoRA '
        "that undoes the distillation, or flow.target_guidance to 3"
    )


def _conditioners(
    arch: LtxArch, components: ModelPaths | None, device: torch.device, mode: VaeMode
) -> Sequence[Conditioner]:
    seconds = Seconds(arch.causal)
    if not arch.first_frame:
        return (seconds,)
    _, *strides = VAE.latent_size({})
    if components is None:
        return seconds, FirstFrame(Outlined(arch.in_channels, (strides[0], strides[1])))
    return seconds, FirstFrame(DiffusersVae(VAE, components, device, mode))


def _sample_defaults(arch: LtxArch) -> SampleDefaults:
    if arch.distilled:
        return SampleDefaults(steps=8, guidance=1.0, guided_by="nothing")
    return SampleDefaults(steps=50, guidance=3.0, guided_by="negative")


def _spec(
    text: T5Encoding, levels: Callable[[int, int, float], Tensor], first_frame_noise: float
) -> ModelSpec:
    """The spec of models with one text encoding, one line of noise levels, and the noise of a first
    frame in sampling."""
    spec = family_spec(
        name="ltx",
        import_path=f"{__name__}:LTX",
        architecture=ArchitectureSpec(
            presets=PRESETS,
            hub_presets=HUB_PRESETS,
            build=LtxTransformer,
            names=NAMES,
            infer_arch=arch_from_config,
            token_streams=lambda arch: TOKEN_STREAMS,
        ),
        precision=PrecisionSpec(
            op_group_of=op_groups_by_name(_STARTS, _ENDS), reference=_REFERENCE
        ),
        make_inputs=make_inputs,
        vae=VAE,
        text=text,
        text_in_stream=False,
        size=(97, 512, 768),
        fps=FPS,
        shift=lambda latents: _shift(latents[0].numel()),
        levels=levels,
        sample_defaults=_sample_defaults,
        sampler=partial(FirstFrameSampler, noise=first_frame_noise),
        advice=_training_advice,
        adapters=AdapterSpec(
            targets={"blocks": (*_ATTENTION, "ff.0", "ff.2"), "attention": _ATTENTION},
            check=check_adapter,
            rules=RULES,
        ),
        verifier="ditkit_ltx.verify:DIFFUSERS",
    )
    shapes = spec.training.empty_item

    def empty_item(arch: LtxArch, clip: tuple[int, int, int], references: Any) -> dict[str, Tensor]:
        item = shapes(arch, clip, references)
        if arch.first_frame and clip[0] > 1:
            item["first_frame"] = item["latents"][:, :1]
        return {**item, "seconds": seconds_of(clip[0], FPS, arch.causal)}

    return replace(
        spec,
        training=replace(spec.training, empty_item=empty_item, loss_mask=first_frame_mask),
        data=replace(spec.data, columns=lambda arch: (INPUT_IMAGE,) if arch.first_frame else ()),
        auxiliary=replace(spec.auxiliary, conditioners=_conditioners),
    )


_CAUSAL = _spec(CAUSAL_TEXT, linear_quadratic_levels, _FIRST_FRAME_NOISE)

_DISTILLED_SPEC = _spec(CAUSAL_TEXT, distilled_levels, _FIRST_FRAME_NOISE)


def _variant(spec: ModelSpec, arch: LtxArch) -> ModelSpec:
    """The family's spec with the text encoding and the sampling of a model from 0.9.5 on."""
    if not arch.causal:
        return spec
    later = (_DISTILLED_SPEC if arch.distilled else _CAUSAL).auxiliary
    return replace(
        spec,
        training=replace(spec.training, empty_item=_CAUSAL.training.empty_item),
        auxiliary=replace(
            spec.auxiliary,
            text_encoder=later.text_encoder,
            sampler=later.sampler,
            models=later.models,
        ),
    )


LTX = replace(_spec(TEXT, terminal_levels, 0.0), variant=_variant)
