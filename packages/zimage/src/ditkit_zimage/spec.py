"""Z-Image as plain values and functions: everything the core needs to train it."""

from dataclasses import replace

from ditkit_core.families.language_models import QWEN3, TextEncoding
from ditkit_core.families.spec import family_spec
from ditkit_core.families.vae import VaeFamily
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    PrecisionSpec,
    SampleDefaults,
    op_groups_by_name,
)
from ditkit_zimage.model import (
    PATCH,
    TEXT_TOKENS,
    TOKEN_STREAMS,
    ZImageTransformer,
    make_inputs,
    num_tokens,
    with_padded_text,
)
from ditkit_zimage.presets import HUB_PRESETS, PRESETS, ZImageArch, arch_from_config
from ditkit_zimage.state_dict import NAMES, RULES

# The operation group that a parameter computes in, by the start of its name, then by the end; all
# others compute in the matmuls' group. The tokens of padding are rows of the residual stream: they
# count as norms so that they stay in fp32.
_STARTS = {
    "embed.t_embedder.": "time_mlp",
    "embed.cap_embedder.0.": "norms",
    "embed.x_pad_token": "norms",
    "embed.cap_pad_token": "norms",
    "head.": "head",
}
_ENDS = {
    ".adaLN_modulation.0.weight": "modulation",
    ".adaLN_modulation.0.bias": "modulation",
    ".norm_q.weight": "qk_norms",
    ".norm_k.weight": "qk_norms",
    **{f".{part}_norm{index}.weight": "norms" for part in ("attention", "ffn") for index in (1, 2)},
}

# As src/zimage/transformer.py of Tongyi-MAI/Z-Image runs in bf16: everything except the sinusoid of
# the noise level, rotary tables and rotation.
_REFERENCE = {
    "timestep": "fp32",
    **dict.fromkeys(("qk_norms", "norms", "modulation", "residual", "time_mlp", "head"), "matmul"),
}

_ATTENTION = tuple(f"attention.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0"))
_MLP = tuple(f"feed_forward.{part}" for part in ("w1", "w2", "w3"))

SHIFT = 3.0
"""Shift of the noise levels towards noise, in the scheduler of both models."""


def _sample_defaults(arch: ZImageArch) -> SampleDefaults:
    """Steps and guidance of the models' authors; their pipelines count guidance from 0, so that a
    guidance of 4 there is 5 here."""
    if arch.distilled:
        return SampleDefaults(steps=8, guidance=1.0, guided_by="nothing")
    return SampleDefaults(steps=50, guidance=5.0, guided_by="negative")


def _training_advice(arch: ZImageArch) -> str:
    if not arch.distilled:
        return ""
    return (
        'Z-Image-Turbo is distilled to a few steps and trains poorly; train the base model instead (model.preset = "base"), set base.assistant '
        "to a LoRA that undoes the distillation, or flow.target_guidance to 3"
    )


VAE = VaeFamily(
    label="the VAE of Z-Image, which is that of FLUX.1",
    remedy="get ae.safetensors of black-forest-labs/FLUX.1-schnell, or name a diffusers vae folder",
    published={
        "latent_channels": 16, "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
        "use_quant_conv": False,
        "use_post_quant_conv": False, "scaling_factor": 0.3611, "shift_factor": 0.1159,
        "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    },
)  # fmt: skip

TEXT = TextEncoding(
    models=(QWEN3,),
    reader="Z-Image",
    remedy="set model.text_encoder to the text_encoder folder of Z-Image, or a bf16 file of its Qwen3 4B",
    num_tokens=TEXT_TOKENS,
)

_SPEC = family_spec(
    name="zimage",
    import_path=f"{__name__}:ZIMAGE",
    architecture=ArchitectureSpec(
        presets=PRESETS,
        hub_presets=HUB_PRESETS,
        build=ZImageTransformer,
        names=NAMES,
        infer_arch=arch_from_config,
        token_streams=lambda arch: TOKEN_STREAMS,
    ),
    precision=PrecisionSpec(op_group_of=op_groups_by_name(_STARTS, _ENDS), reference=_REFERENCE),
    make_inputs=make_inputs,
    vae=VAE,
    text=TEXT,
    patch=(1, PATCH, PATCH),
    shift=SHIFT,
    sample_defaults=_sample_defaults,
    advice=_training_advice,
    adapters=AdapterSpec(
        targets={
            "blocks": (*_ATTENTION, *_MLP),
            "attention": _ATTENTION,
            "modulation": ("adaLN_modulation.0",),
        },
        rules=RULES,
    ),
    verifier="ditkit_zimage.verify:DIFFUSERS",
)

# Images and captions have padding tokens, which take part, so they are counted, and captions come
# in few lengths.
ZIMAGE = replace(
    _SPEC,
    training=replace(
        _SPEC.training,
        assemble=with_padded_text,
        num_tokens=num_tokens,
        empty_item=lambda *size: with_padded_text(_SPEC.training.empty_item(*size)),
    ),
)
