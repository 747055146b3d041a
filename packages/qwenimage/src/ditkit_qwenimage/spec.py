"""Qwen-Image as plain values and functions: everything the core needs to train it."""

from dataclasses import replace
from functools import partial
from typing import Any

from einops import rearrange
from jaxtyping import Float, Float64
from torch import Tensor

from ditkit_core.families.euler import classifier_free, linear_shift, shifted_levels
from ditkit_core.families.language_models import TextEncoding
from ditkit_core.families.spec import family_spec
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    ModelSpec,
    PrecisionSpec,
    SampleDefaults,
    op_groups_by_name,
)
from ditkit_qwenimage.encoders import (
    EDIT_PLUS_TEXT,
    EDIT_TEXT,
    TEXT,
    VAE,
    only_reference_size,
    picture_size,
    reference_size,
)
from ditkit_qwenimage.model import (
    PATCH,
    QwenImageTransformer,
    make_inputs,
    token_streams,
    tokens_of,
)
from ditkit_qwenimage.presets import HUB_PRESETS, PRESETS, QwenImageArch, arch_from_config
from ditkit_qwenimage.state_dict import NAMES, RULES

# The operation group that a parameter computes in, by the start of its name, then by the end; all
# others compute in the matmuls' group: also the matrices of modulation, a third of all weights.
_STARTS = {
    "embed.timestep_embedder.": "time_mlp",
    "embed.txt_norm.": "norms",
    "head.": "head",
}
_ENDS = dict.fromkeys(
    (f".norm_{stream}{part}.weight" for stream in ("", "added_") for part in "qk"), "qk_norms"
)

# As diffusers runs in bf16: everything, including the timestep, except norms, rotary tables and
# rotation.
_REFERENCE = dict.fromkeys(("timestep", "modulation", "residual", "time_mlp", "head"), "matmul")

_ATTENTION = (
    *(f"attn.to_{part}" for part in ("q", "k", "v", "out.0", "add_out")),
    *(f"attn.add_{part}_proj" for part in "qkv"),
)
_MLP = tuple(f"{stream}_mlp.net.{part}" for stream in ("img", "txt") for part in ("0.proj", "2"))

_FEW, _MANY = (256, 0.5), (8192, 0.9)
"""(tokens, mu) of the two ends of the line that noise levels are shifted along."""
_shift = partial(linear_shift, few=_FEW, many=_MANY)
_TERMINAL = 0.02
"""The last noise level above 0 in sampling. Source of these: the published
`scheduler_config.json`."""


def _levels(pixels: int, steps: int, shift: float) -> Float64[Tensor, " levels"]:
    return shifted_levels(steps, shift or _shift(pixels // PATCH**2), _TERMINAL)


def rescaled_guide(
    conditional: Float[Tensor, "c 1 h w"], unconditional: Float[Tensor, "c 1 h w"], strength: float
) -> Float[Tensor, "c 1 h w"]:
    """The guided velocity with each token's length of the conditional one.

    Source: `QwenImagePipeline.__call__` of diffusers.
    """
    guided = classifier_free(conditional, unconditional, strength)
    norms = [tokens_of(x).norm(dim=-1) for x in (conditional, guided)]
    rows = conditional.shape[2] // PATCH
    factors = rearrange(norms[0] / norms[1], "(h w) -> 1 1 h w", h=rows)
    return guided * factors.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)


def _spec(text: TextEncoding, **references: Any) -> ModelSpec:
    """The spec of models of one task, with the sizes of its references."""
    return family_spec(
        name="qwenimage",
        import_path=f"{__name__}:QWENIMAGE",
        architecture=ArchitectureSpec(
            presets=PRESETS,
            hub_presets=HUB_PRESETS,
            build=QwenImageTransformer,
            names=NAMES,
            infer_arch=arch_from_config,
            token_streams=token_streams,
        ),
        precision=PrecisionSpec(
            op_group_of=op_groups_by_name(_STARTS, _ENDS), reference=_REFERENCE
        ),
        make_inputs=make_inputs,
        vae=VAE,
        text=text,
        patch=(1, PATCH, PATCH),
        shift=lambda latents: _shift(latents[0].numel() // PATCH**2),
        levels=_levels,
        guide=rescaled_guide,
        sample_defaults=lambda arch: SampleDefaults(steps=50, guidance=4.0, guided_by="negative"),
        adapters=AdapterSpec(
            targets={
                "blocks": (*_ATTENTION, *_MLP),
                "attention": _ATTENTION,
                "modulation": ("img_mod.1", "txt_mod.1"),
            },
            rules=RULES,
        ),
        verifier="ditkit_qwenimage.verify:DIFFUSERS",
        **references,
    )


_EDITS = {
    "edit": _spec(
        EDIT_TEXT,
        reference_size=only_reference_size,
        picture_size=only_reference_size,
        needs_references=True,
    ),
    "edit-plus": _spec(
        EDIT_PLUS_TEXT,
        reference_size=reference_size,
        picture_size=picture_size,
        needs_references=True,
    ),
}
"""By task of the architecture."""


def _variant(spec: ModelSpec, arch: QwenImageArch) -> ModelSpec:
    """The family's spec with the references and the text encoder of an architecture's task."""
    if arch.task == "image":
        return spec
    edits = _EDITS[arch.task]
    data = replace(edits.data, shape_reference=-1)
    return replace(spec, training=edits.training, data=data, auxiliary=edits.auxiliary)


QWENIMAGE = replace(_spec(TEXT), variant=_variant)
