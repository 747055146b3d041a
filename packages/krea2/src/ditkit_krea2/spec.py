"""Krea 2 as plain values and functions: everything the core needs to train it."""

import math
from functools import partial

from jaxtyping import Float64
from torch import Tensor

from ditkit_core.families.euler import linear_shift, shifted_levels
from ditkit_core.families.spec import family_spec
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    PrecisionSpec,
    SampleDefaults,
    op_groups_by_name,
)
from ditkit_krea2.encoders import TEXT, TEXT_TOKENS, VAE
from ditkit_krea2.model import PATCH, TOKEN_STREAMS, Krea2Transformer, make_inputs
from ditkit_krea2.presets import HUB_PRESETS, PRESETS, Krea2Arch, arch_from_config
from ditkit_krea2.state_dict import NAMES, RULES

# The operation group that a parameter computes in, by the start of its name, then by the end; all
# others compute in the matmuls' group.
_STARTS = {
    "embed.time_embed.": "time_mlp",
    "embed.time_mod_proj.": "modulation",
    "head.": "head",
}
_ENDS = {
    ".scale_shift_table": "modulation",
    **dict.fromkeys((".norm_q.offset", ".norm_k.offset"), "qk_norms"),
    **dict.fromkeys((".norm1.offset", ".norm2.offset", "txt_in.norm.offset"), "norms"),
}

# As diffusers runs in bf16: everything except norms, the sinusoid of the noise level, rotary tables
# and rotation.
_REFERENCE = {
    "timestep": "fp32",
    **dict.fromkeys(("modulation", "residual", "time_mlp", "head"), "matmul"),
}

_ATTENTION = tuple(f"attn.to_{part}" for part in ("q", "k", "v", "gate", "out.0"))
_LAYERS = (*_ATTENTION, *(f"ff.{part}" for part in ("gate", "up", "down")))

_FEW, _MANY = (256, 0.5), (6400, 1.15)
"""(tokens, mu) of the two ends of the line that the base is sampled along; the distilled model
takes the second mu for any size."""
_shift = partial(linear_shift, few=_FEW, many=_MANY)


def _levels(pixels: int, steps: int, shift: float) -> Float64[Tensor, " levels"]:
    return shifted_levels(steps, shift or _shift(pixels // PATCH**2))


def _sample_defaults(arch: Krea2Arch) -> SampleDefaults:
    """Steps and guidance of the models' authors; their pipeline counts guidance from 0, so that 4.5
    there is 5.5 here."""
    if arch.distilled:
        shift = math.exp(_MANY[1])
        return SampleDefaults(steps=8, guidance=1.0, guided_by="nothing", shift=shift)
    return SampleDefaults(steps=28, guidance=5.5, guided_by="negative")


def _training_advice(arch: Krea2Arch) -> str:
    if not arch.distilled:
        return ""
    return (
        "the distilled Krea 2 has a few steps and trains poorly; train the base model instead "
        '(model.preset = "base") and sample with the adapter on either, set base.assistant to a '
        "LoRA that undoes the distillation, or flow.target_guidance to 3"
    )


KREA2 = family_spec(
    name="krea2",
    import_path=f"{__name__}:KREA2",
    architecture=ArchitectureSpec(
        presets=PRESETS,
        hub_presets=HUB_PRESETS,
        build=Krea2Transformer,
        names=NAMES,
        infer_arch=arch_from_config,
        token_streams=lambda arch: TOKEN_STREAMS,
    ),
    precision=PrecisionSpec(op_group_of=op_groups_by_name(_STARTS, _ENDS), reference=_REFERENCE),
    make_inputs=make_inputs,
    vae=VAE,
    text=TEXT,
    text_shape=lambda arch: (TEXT_TOKENS, arch.text_layers * arch.text_dim),
    patch=(1, PATCH, PATCH),
    shift=lambda latents: _shift(latents[0].numel() // PATCH**2),
    levels=_levels,
    sample_defaults=_sample_defaults,
    advice=_training_advice,
    adapters=AdapterSpec(
        targets={"blocks": _LAYERS, "attention": _ATTENTION},
        rules=RULES,
    ),
    verifier="ditkit_krea2.verify:DIFFUSERS",
)
