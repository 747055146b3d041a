"""FLUX.3 as plain values and functions: everything the core needs to train it."""

from dataclasses import replace

from ditkit_core.families.batch_norm_vae import batch_normed
from ditkit_core.families.language_models import QWEN3_VL, TextEncoding
from ditkit_core.families.references import cropped_size
from ditkit_core.families.spec import family_spec
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    PrecisionSpec,
    SampleDefaults,
    op_groups_by_name,
)
from ditkit_flux3.model import TOKEN_STREAMS, Flux3Transformer, make_inputs
from ditkit_flux3.presets import HUB_PRESETS, PRESETS, Flux3Arch, arch_from_config
from ditkit_flux3.state_dict import NAMES, RULES

# The operation group that a parameter computes in, by the start of its name, then by the end; all
# others compute in the matmuls' group.
_STARTS = {
    "embed.time_in.": "time_mlp",
    "embed.ref_time_in.": "time_mlp",
    "embed.early_stream_modulations.": "modulation",
    "embed.single_stream_modulations.": "modulation",
    "head.": "head",
}
_ENDS = {".query_norm.weight": "qk_norms", ".key_norm.weight": "qk_norms"}

# As diffusers runs in bf16: everything, including the timestep, except norms and rotation of q and
# k, and rotary tables.
_REFERENCE = dict.fromkeys(
    ("timestep", "norms", "modulation", "residual", "time_mlp", "head"), "matmul"
)

_ATTENTION = ("q_proj", "k_proj", "v_proj", "attn_out")
_MLP = ("mlp_in", "mlp_out")
_MODULATION = tuple(
    f"{blocks}_stream_modulations.{mode}.lin"
    for blocks in ("early", "single")
    for mode in ("txt", "image", "image_cond")
)

SHIFT = 6.93
"""Shift of the noise levels towards noise, in the scheduler of both models, whatever the
resolution."""

_MAX_PIXELS_OF_ONE, _MAX_PIXELS_OF_SEVERAL = 4 * 1024**2, 1024**2


def reference_size(height: int, width: int, count: int) -> tuple[int, int]:
    """Height and width at which a reference image is encoded, in pixels.

    An image is shrunk to at most 4 megapixels, or to 1 if there are several, and its sides are
    cropped to multiples of 16. The authors' pipeline crops several likewise; a single one whose
    sides are no multiples it pads with its reflection instead.

    Args:
        height: Height of the file's image in pixels.
        width: Width of the file's image in pixels.
        count: Number of references that the sample has.

    Raises:
        UserError: If the image is smaller than 64 pixels on a side, or longer than 8:1.
    """
    return cropped_size(height, width, _MAX_PIXELS_OF_ONE if count == 1 else _MAX_PIXELS_OF_SEVERAL)


def _sample_defaults(arch: Flux3Arch) -> SampleDefaults:
    """Steps and guidance of the models' authors."""
    if arch.flow_map:
        return SampleDefaults(steps=16, guidance=1.0, guided_by="nothing")
    return SampleDefaults(steps=50, guidance=3.5, guided_by="negative")


def _training_advice(arch: Flux3Arch) -> str:
    if not arch.flow_map:
        return ""
    return (
        "this klein is distilled to a flow map, and is trained at jumps of no length alone, where "
        "its target is known; how far that carries to the jumps of 16 steps is not known. Train "
        'the base instead (model.preset = "klein-base"): its adapters have the same layers'
    )


def _full_refusal(arch: Flux3Arch) -> str:
    if not arch.flow_map:
        return ""
    return (
        "every weight of a flow map would be trained at jumps of no length, and the jumps that it "
        'samples with would be lost; train an adapter, or the base (model.preset = "klein-base")'
    )


VAE = batch_normed(
    label="the VAE of FLUX.2 and FLUX.3",
    remedy="get ae.safetensors of black-forest-labs/FLUX.2-dev, or name a diffusers vae folder",
)

TEXT = TextEncoding(
    models=(replace(QWEN3_VL, layers=(4, 8, 12, 16, 20, 24, 28, 32)),),
    reader="FLUX.3",
    remedy="set model.text_encoder to the text_encoder folder of FLUX.3, or a bf16 file of its Qwen3-VL 4B",
    num_tokens=8192,
    keeps_padding=True,
    window=80,
    planned_tokens=480,
)
"""The transformer attends to the whole window of a caption, padding included."""

FLUX3 = family_spec(
    name="flux3",
    import_path=f"{__name__}:FLUX3",
    architecture=ArchitectureSpec(
        presets=PRESETS,
        hub_presets=HUB_PRESETS,
        build=Flux3Transformer,
        names=NAMES,
        infer_arch=arch_from_config,
        token_streams=lambda arch: TOKEN_STREAMS,
    ),
    precision=PrecisionSpec(op_group_of=op_groups_by_name(_STARTS, _ENDS), reference=_REFERENCE),
    make_inputs=make_inputs,
    vae=VAE,
    text=TEXT,
    reference_size=reference_size,
    shift=SHIFT,
    sample_defaults=_sample_defaults,
    advice=_training_advice,
    full_refusal=_full_refusal,
    adapters=AdapterSpec(
        targets={
            "blocks": (*_ATTENTION, *_MLP),
            "attention": _ATTENTION,
            "modulation": (*_MODULATION, "adaLN_modulation.1"),
        },
        rules=RULES,
    ),
    verifier="ditkit_flux3.verify:DIFFUSERS",
)
