"""Qwen-Image 2.1 as plain values and functions: everything the core needs to train it."""

from dataclasses import replace
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
from ditkit_qwen.encoders import TEXT, VAE, reference_size
from ditkit_qwen.model import TOKEN_STREAMS, QwenTransformer, make_inputs
from ditkit_qwen.presets import HUB_PRESETS, PRESETS, QwenArch, arch_from_config
from ditkit_qwen.state_dict import NAMES, RULES

# The operation group that a parameter computes in, by the start of its name, then by the end; all
# others compute in the matmuls' group.
_STARTS = {
    "embed.timestep_embedder.": "time_mlp",
    "embed.modulation.": "modulation",
    "head.": "head",
}
_ENDS = {
    ".text_norm.offset": "norms",
    **dict.fromkeys((".norm_q.weight", ".norm_k.weight"), "qk_norms"),
}

# As diffusers runs in bf16: everything, including the timestep, except norms, rotary tables and
# rotation.
_REFERENCE = dict.fromkeys(("timestep", "modulation", "residual", "time_mlp", "head"), "matmul")

_ATTENTION = tuple(f"attn.to_{part}" for part in ("q", "k", "v", "out.0"))
_LAYERS = (*_ATTENTION, *(f"img_mlp.{part}" for part in ("gate_layer", "proj", "out")))

_FEW, _MANY = (256, 0.5), (8192, 0.9)
"""(tokens, mu) of the two ends of the line that noise levels are shifted along."""
_TERMINAL = 0.02
"""The last noise level above 0 in sampling. Source of these: the published
`scheduler_config.json`, as several programs quote it."""
_shift = partial(linear_shift, few=_FEW, many=_MANY)


def _levels(pixels: int, steps: int, shift: float) -> Float64[Tensor, " levels"]:
    return shifted_levels(steps, shift or _shift(pixels), _TERMINAL)


def _sample_defaults(arch: QwenArch) -> SampleDefaults:
    """The pipeline's: the model is meant to be sampled without guidance."""
    return SampleDefaults(steps=40, guidance=1.0, guided_by="negative")


_SPEC = family_spec(
    name="qwen",
    import_path=f"{__name__}:QWEN",
    architecture=ArchitectureSpec(
        presets=PRESETS,
        hub_presets=HUB_PRESETS,
        build=QwenTransformer,
        names=NAMES,
        infer_arch=arch_from_config,
        token_streams=lambda arch: TOKEN_STREAMS,
    ),
    precision=PrecisionSpec(op_group_of=op_groups_by_name(_STARTS, _ENDS), reference=_REFERENCE),
    make_inputs=make_inputs,
    vae=VAE,
    text=TEXT,
    reference_size=reference_size,
    picture_size=reference_size,
    shift=lambda latents: _shift(latents[0].numel()),
    levels=_levels,
    sample_defaults=_sample_defaults,
    adapters=AdapterSpec(
        targets={"blocks": _LAYERS, "attention": _ATTENTION},
        rules=RULES,
    ),
    verifier="ditkit_qwen.verify:DIFFUSERS",
)
# The pipeline rounds sides to two latent pixels, because a slot of an image stands for 2 x 2, and a
# sample has the shape of its last reference.
QWEN = replace(_SPEC, data=replace(_SPEC.data, size_step=32, shape_reference=-1))
