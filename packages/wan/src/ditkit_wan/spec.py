"""Wan as plain values and functions: everything the core needs to train it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ditkit_core.models.encoders import AuxiliaryModel, Encoder, Sampler, Streaming, VaeMode
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.protocol import Engine
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    AuxiliarySpec,
    DataSpec,
    DemoSpec,
    ModelSpec,
    PrecisionSpec,
    TrainingSpec,
    op_groups_by_name,
)
from ditkit_wan.adapters import RULES, RULES_WITHOUT_DIFFUSERS
from ditkit_wan.conditioning.columns import columns, conditioners
from ditkit_wan.model.carry import token_streams
from ditkit_wan.model.inputs import assemble, empty_item, loss_mask, make_inputs, num_tokens
from ditkit_wan.model.transformer import WanTransformer
from ditkit_wan.presets import HUB_PRESETS, PRESETS, WanArch, arch_from_config
from ditkit_wan.state_dict import NAMES
from ditkit_wan.variants import data_of, experts, sample_defaults, training_of

# The operation group that a parameter computes in, by the start of its name, then by the end; all others compute in the matmuls' group.
_STARTS = {"embed.time_embedding.": "time_mlp", "embed.time_projection.": "time_mlp", "head.": "head"}
_ENDS = {
    ".modulation": "modulation",
    ".norm3.weight": "norms",
    ".norm3.bias": "norms",
    ".norm_q.weight": "qk_norms",
    ".norm_k.weight": "qk_norms",
    ".norm_k_img.weight": "qk_norms",
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

# As wan/modules/model.py of Wan-Video/Wan2.1 runs under its bf16 autocast: rotation in complex128, q and k rounded between norm and
# weight, the stream in bf16 until the first sum makes it fp32; everything else that is fp32 there is fp32 by default.
_REFERENCE = {"rotary_tables": "fp64", "rotary": "fp64", "qk_norms": "matmul", "entry": "matmul"}

_ATTENTION = tuple(f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo")


_DIFFUSERS = "write it with --to diffusers"


def _auxiliary_models(arch: WanArch, components: ModelPaths) -> Sequence[AuxiliaryModel]:
    from ditkit_wan.auxiliary import auxiliary_models

    return auxiliary_models(arch, components)


# The encoders and the sampler pull in diffusers and transformers: only the stages that need them pay for the import.
def _media_encoder(
    components: ModelPaths, device: torch.device, mode: VaeMode, *, arch: WanArch | None = None
) -> Encoder:
    from ditkit_wan.encoders.keyframes import vae_class

    return vae_class(arch)(components, device, mode=mode, channels=arch.out_channels if arch else None)


def _text_encoder(components: ModelPaths, device: torch.device, dtype: torch.dtype, streaming: Streaming) -> Encoder:
    from ditkit_wan.encoders.text import TextEncoder

    return TextEncoder(components, device, dtype, streaming)


def _sampler(
    components: ModelPaths,
    device: torch.device,
    dtype: torch.dtype,
    decodings: Sequence[VaeMode],
    *,
    arch: WanArch | None = None,
) -> Sampler:
    from ditkit_wan.sampling import WanSampler

    return WanSampler(components, device, decodings=decodings, arch=arch)


def _variant(spec: ModelSpec, arch: WanArch) -> ModelSpec:
    """The family's spec with everything that differs for this architecture."""
    encoder, sampler = partial(_media_encoder, arch=arch), partial(_sampler, arch=arch)
    adapters = spec.adapters
    if arch.ref_conv or arch.camera_channels or arch.music:  # diffusers has no such model to compare with
        adapters = replace(adapters, verify=None, verify_whole=None, rules=RULES_WITHOUT_DIFFUSERS)
    if arch.image_positions:
        adapters = replace(adapters, whole_unread={"official": f"does not know img_emb.emb_pos; {_DIFFUSERS}"})
    return replace(
        spec,
        training=training_of(spec.training, arch),
        data=data_of(spec.data, arch),
        auxiliary=replace(spec.auxiliary, media_encoder=encoder, sampler=sampler),
        adapters=adapters,
    )


def _write_demo(folder: Path) -> None:
    from ditkit_wan.demo.write import write_demo

    write_demo(folder)


def _verify_export(adapter: Path, components: ModelPaths, model: Any, engine: Engine) -> str:
    from ditkit_wan.verify import DIFFUSERS

    return DIFFUSERS.verify(adapter, components, model, engine)


def _verify_whole(folder: Path, form: str, model: Any, engine: Engine) -> str:
    from ditkit_wan.verify import DIFFUSERS

    return DIFFUSERS.verify_whole(folder, form, model, engine)


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
        loss_mask=loss_mask,
    ),
    data=DataSpec(frame_step=4, size_step=16, fps=16.0, size=(81, 480, 832), columns=columns),
    auxiliary=AuxiliarySpec(
        media_encoder=_media_encoder,
        text_encoder=_text_encoder,
        sampler=_sampler,
        sample_defaults=sample_defaults,
        models=_auxiliary_models,
        components=lambda arch: ("image_encoder",) if arch.image_dim else (),
        conditioners=conditioners,
    ),
    adapters=AdapterSpec(
        targets={
            "q,k,v,o,ffn.0,ffn.2": (*_ATTENTION, "ffn.0", "ffn.2"),
            "q,k,v,o": _ATTENTION,
            "self": tuple(name for name in _ATTENTION if name.startswith("self")),
            "q,k,v,o,ffn.0,ffn.2,k_img,v_img": (*_ATTENTION, "ffn.0", "ffn.2", "cross_attn.k_img", "cross_attn.v_img"),
            # With the music layers of WanToDance, which DiffSynth's recipe adapts as well.
            "q,k,v,o,ffn.0,ffn.2,music": (*_ATTENTION, "ffn.0", "ffn.2", "music.v", "music.o"),
            # VACE's default targets are all blocks of both kinds; these are the VACE blocks alone.
            "vace": tuple(f"vace_blocks.*.{name}" for name in (*_ATTENTION, "ffn.0", "ffn.2")),
        },
        rules=RULES,
        verify=_verify_export,
        verify_whole=_verify_whole,
    ),
    demo=DemoSpec(write=_write_demo, config=Path(__file__).parent / "demo" / "demo.toml"),
    import_path=f"{__name__}:WAN",
    variant=_variant,
)
