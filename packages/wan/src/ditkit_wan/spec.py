"""Wan as plain values and functions: everything the core needs to train it."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ditkit_core.families.first_frame import first_frame_mask
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    AuxiliarySpec,
    DataSpec,
    DemoSpec,
    ModelSpec,
    PrecisionSpec,
    TrainingSpec,
    lazy,
    op_groups_by_name,
)
from ditkit_wan.adapters import RULES, RULES_WITHOUT_DIFFUSERS
from ditkit_wan.conditioning.columns import columns, conditioners
from ditkit_wan.model.carry import token_streams
from ditkit_wan.model.inputs import assemble, empty_item, make_inputs, num_tokens
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.presets import HUB_PRESETS, PRESETS, WanArch, arch_from_config
from ditkit_wan.state_dict import NAMES
from ditkit_wan.variants import data_of, experts, sample_defaults, training_of

# The operation group that a parameter computes in, by the start of its name, then by the end; all
# others compute in the matmuls' group.
_STARTS = {
    "embed.time_embedding.": "time_mlp",
    "embed.time_projection.": "time_mlp",
    "head.": "head",
    "embed.speech.casual_audio_encoder.": "norms",
    "embed.animate.motion_encoder.": "norms",
    "embed.animate.face_encoder.": "norms",
}
_ENDS = {
    ".modulation": "modulation",
    ".norm3.weight": "norms",
    ".norm3.bias": "norms",
    ".norm_q.weight": "qk_norms",
    ".norm_k.weight": "qk_norms",
    ".norm_k_img.weight": "qk_norms",
    ".face.q_norm.weight": "qk_norms",
    ".face.k_norm.weight": "qk_norms",
    ".img_emb.emb_pos": "norms",
    **{
        f".{module}.{leaf}": "norms"
        for module in (
            "img_emb.proj.0",
            "img_emb.proj.4",
            "img_emb_refimage.proj.0",
            "img_emb_refimage.proj.4",
            "norm1",
            "norm2",
        )
        for leaf in ("weight", "bias")
    },
}

# As wan/modules/model.py of Wan-Video/Wan2.1 runs under its bf16 autocast: rotation in complex128,
# q and k rounded between norm and weight, the stream in bf16 until the first sum makes it fp32;
# everything else that is fp32 there is fp32 by default.
_REFERENCE = {"rotary_tables": "fp64", "rotary": "fp64", "qk_norms": "matmul", "entry": "matmul"}

_ATTENTION = tuple(f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo")


_DIFFUSERS = "write it with --to diffusers"
_MEDIA_ENCODER = lazy("ditkit_wan.encoders.keyframes:media_encoder")
_SAMPLER = lazy("ditkit_wan.sampling:WanSampler")


def _sampler(
    components: Any, device: Any, dtype: Any, decodings: Any, *, arch: WanArch | None = None
) -> Any:
    return _SAMPLER(components, device, decodings=decodings, arch=arch)


def _variant(spec: ModelSpec, arch: WanArch) -> ModelSpec:
    """The family's spec with everything that differs for this architecture."""
    encoder, sampler = partial(_MEDIA_ENCODER, arch=arch), partial(_sampler, arch=arch)
    adapters = spec.adapters
    # diffusers has no such model to compare with
    if arch.ref_conv or arch.camera_channels or arch.music or arch.speech:
        adapters = replace(adapters, verify=None, verify_whole=None, rules=RULES_WITHOUT_DIFFUSERS)
    if arch.image_positions:
        adapters = replace(
            adapters, whole_unread={"official": f"does not know img_emb.emb_pos; {_DIFFUSERS}"}
        )
    if arch.animate:
        adapters = replace(
            adapters,
            whole_unread={
                "official": f"converts some tensors by their values, which are not compared; {_DIFFUSERS}"
            },
        )
    return replace(
        spec,
        training=training_of(spec.training, arch),
        data=data_of(spec.data, arch),
        auxiliary=replace(spec.auxiliary, media_encoder=encoder, sampler=sampler),
        adapters=adapters,
    )


WAN = ModelSpec(
    name="wan",
    architecture=ArchitectureSpec(
        presets=PRESETS,
        hub_presets=HUB_PRESETS,
        build=WanTransformer,
        names=NAMES,
        infer_arch=arch_from_config,
        experts=experts,
        token_streams=token_streams,
    ),
    precision=PrecisionSpec(op_group_of=op_groups_by_name(_STARTS, _ENDS), reference=_REFERENCE),
    training=TrainingSpec(
        make_inputs=make_inputs,
        empty_item=empty_item,
        num_tokens=num_tokens,
        shift=lambda latents: 5.0,
        assemble=assemble,
        loss_mask=first_frame_mask,
    ),
    data=DataSpec(
        frame_step=4,
        size_step=16,
        fps=16.0,
        size=(81, 480, 832),
        columns=columns,
        caption_words=(80, 100),
    ),
    auxiliary=AuxiliarySpec(
        media_encoder=_MEDIA_ENCODER,
        text_encoder=lazy("ditkit_wan.encoders.text:TextEncoder"),
        sampler=_sampler,
        sample_defaults=sample_defaults,
        models=lazy("ditkit_wan.auxiliary:auxiliary_models"),
        components=lambda arch: (
            *(("image_encoder",) if arch.image_dim else ()),
            *(("audio_encoder",) if arch.speech else ()),
        ),
        conditioners=conditioners,
    ),
    adapters=AdapterSpec(
        targets={
            "q,k,v,o,ffn.0,ffn.2": (*_ATTENTION, "ffn.0", "ffn.2"),
            "q,k,v,o": _ATTENTION,
            "self": tuple(name for name in _ATTENTION if name.startswith("self")),
            "q,k,v,o,ffn.0,ffn.2,k_img,v_img": (
                *_ATTENTION,
                "ffn.0",
                "ffn.2",
                "cross_attn.k_img",
                "cross_attn.v_img",
            ),
            # With the music layers of WanToDance, which DiffSynth's recipe adapts as well.
            "q,k,v,o,ffn.0,ffn.2,music": (*_ATTENTION, "ffn.0", "ffn.2", "music.v", "music.o"),
            # With the injectors of S2V, which DiffSynth's recipe adapts as well.
            "q,k,v,o,ffn.0,ffn.2,audio": (
                *_ATTENTION,
                "ffn.0",
                "ffn.2",
                *(f"injector.{part}" for part in "qkvo"),
            ),
            # With the face adapters of Animate.
            "q,k,v,o,ffn.0,ffn.2,face": (
                *_ATTENTION,
                "ffn.0",
                "ffn.2",
                *(f"face.{part}" for part in ("linear1_kv", "linear1_q", "linear2")),
            ),
            # VACE's default targets are all blocks of both kinds; these are the VACE blocks alone.
            "vace": tuple(f"vace_blocks.*.{name}" for name in (*_ATTENTION, "ffn.0", "ffn.2")),
        },
        rules=RULES,
        verify=lazy("ditkit_wan.verify:DIFFUSERS.verify"),
        verify_whole=lazy("ditkit_wan.verify:DIFFUSERS.verify_whole"),
    ),
    demo=DemoSpec(
        write=lazy("ditkit_wan.demo.write:write_demo"),
        config=Path(__file__).parent / "demo" / "demo.toml",
        trained_base=True,
    ),
    import_path=f"{__name__}:WAN",
    variant=_variant,
)
