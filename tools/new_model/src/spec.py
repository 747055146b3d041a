"""Zed as plain values and functions: everything the core needs to train it."""

from ditkit_zed.encoders import TEXT, VAE
from ditkit_zed.model import PATCH, TOKEN_STREAMS, ZedTransformer, make_inputs
from ditkit_zed.presets import HUB_PRESETS, PRESETS, arch_from_config
from ditkit_zed.state_dict import NAMES

from ditkit_core.families.spec import family_spec
from ditkit_core.models.spec import (
    AdapterSpec,
    ArchitectureSpec,
    PrecisionSpec,
    SampleDefaults,
    op_groups_by_name,
)

_ATTENTION = tuple(f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo")

ZED = family_spec(
    name="zed",
    import_path=f"{__name__}:ZED",
    architecture=ArchitectureSpec(
        presets=PRESETS,
        hub_presets=HUB_PRESETS,
        build=ZedTransformer,
        names=NAMES,
        infer_arch=arch_from_config,
        token_streams=lambda arch: TOKEN_STREAMS,
    ),
    # FILL IN 5: the operation group that each parameter computes in (time_mlp, modulation, norms, qk_norms, head), by the start of its name, then by
    # its end; all others compute in the matmuls'. Without this argument, usual names decide.
    precision=PrecisionSpec(
        op_group_of=op_groups_by_name(
            {"embed.time_": "time_mlp", "head.": "head"},
            {
                ".modulation": "modulation",
                ".norm_q.weight": "qk_norms",
                ".norm_k.weight": "qk_norms",
            },
        )
    ),
    make_inputs=make_inputs,
    vae=VAE,
    text=TEXT,
    patch=PATCH,
    text_in_stream=False,
    # FILL IN 5: default size of samples and training media, the shift that the authors trained and sample with, their steps and guidance.
    size=SIZE_AND_RATE,
    shift=3.0,
    sample_defaults=lambda arch: SampleDefaults(steps=50, guidance=4.0),
    # FILL IN 6: sets of layers that adapters are trained on, the usual one first; `rules` say which programs read which files.
    adapters=AdapterSpec(
        targets={"blocks": (*_ATTENTION, "ffn.0", "ffn.2"), "attention": _ATTENTION},
    ),
    # FILL IN 7: `verifier="ditkit_zed.verify:DIFFUSERS"`, once verify.py describes diffusers' transformer; exports are then verified with it.
)
