"""FLUX.2 as plain values and functions: everything the core needs to train it."""

from dataclasses import replace

from ditkit_core.families.spec import family_spec
from ditkit_core.models.spec import AdapterSpec, ArchitectureSpec, PrecisionSpec, op_groups_by_name
from ditkit_flux2.adapters import RULES, check_adapter
from ditkit_flux2.conditioning.references import reference_size
from ditkit_flux2.encoders import TEXT, VAE
from ditkit_flux2.model.carry import TOKEN_STREAMS
from ditkit_flux2.model.inputs import make_inputs
from ditkit_flux2.model.transformer import Flux2Transformer
from ditkit_flux2.presets import HUB_PRESETS, PRESETS, Flux2Arch, arch_from_config
from ditkit_flux2.schedule import sample_defaults, sigmas, training_shift
from ditkit_flux2.state_dict import NAMES

# The operation group that a parameter computes in, by the start of its name, then by the end; all
# others compute in the matmuls' group.
_STARTS = {
    "embed.time_in.": "time_mlp",
    "embed.guidance_in.": "time_mlp",
    "embed.double_stream_modulation_": "modulation",
    "embed.single_stream_modulation.": "modulation",
    "head.": "head",
}
_ENDS = {".query_norm.weight": "qk_norms", ".key_norm.weight": "qk_norms"}

# As src/flux2/model.py of black-forest-labs/flux2 runs in bf16: everything, including the timestep,
# except rotary tables and rotation.
_REFERENCE = dict.fromkeys(
    ("timestep", "qk_norms", "norms", "modulation", "residual", "time_mlp", "head"), "matmul"
)

_STREAMS = ("img", "txt")
_ATTENTION = tuple(
    f"{stream}_attn.{part}" for stream in _STREAMS for part in ("q", "k", "v", "proj")
)
_MLP = tuple(f"{stream}_mlp.{part}" for stream in _STREAMS for part in (0, 2))
_SINGLE = ("linear1", "linear2")  # of a single block: each has rows of attention and of the MLP
_MODULATION = (
    *(f"double_stream_modulation_{stream}.lin" for stream in _STREAMS),
    "single_stream_modulation.lin",
    "adaLN_modulation.1",
)


def _training_advice(arch: Flux2Arch) -> str:
    if not arch.distilled:
        return ""
    base = next(
        (
            f' (model.preset = "{name}")'
            for name, other in PRESETS.items()
            if other == replace(arch, distilled=False)
        ),
        "",
    )
    return (
        f"this klein is distilled to a few steps and trains poorly; train its base model "
        f"instead{base}, set base.assistant to a LoRA that "
        "undoes the distillation, or flow.target_guidance to 3"
    )


FLUX2 = family_spec(
    name="flux2",
    import_path=f"{__name__}:FLUX2",
    architecture=ArchitectureSpec(
        presets=PRESETS,
        hub_presets=HUB_PRESETS,
        build=Flux2Transformer,
        names=NAMES,
        infer_arch=arch_from_config,
        token_streams=lambda arch: TOKEN_STREAMS,
    ),
    precision=PrecisionSpec(op_group_of=op_groups_by_name(_STARTS, _ENDS), reference=_REFERENCE),
    make_inputs=make_inputs,
    vae=VAE,
    text=TEXT,
    text_shape=lambda arch: (arch.text_tokens, arch.text_dim),
    reference_size=reference_size,
    shift=training_shift,
    levels=sigmas,
    sample_defaults=sample_defaults,
    advice=_training_advice,
    adapters=AdapterSpec(
        targets={
            "blocks": (*_ATTENTION, *_MLP, *_SINGLE),
            "attention": (*_ATTENTION, *_SINGLE),
            "modulation": _MODULATION,
        },
        check=check_adapter,
        rules=RULES,
    ),
    verifier="ditkit_flux2.verify:DIFFUSERS",
)
