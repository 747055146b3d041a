"""The training steps that tools/gpu/gpu_models.py takes: models at their published sizes, and the
modes that they run in."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.models.precision import Precision, PrecisionConfig
from ditkit_core.models.spec import ModelSpec

SMALL = {
    "flux2": {
        "dim": 256,
        "heads": 2,
        "double_layers": 1,
        "single_layers": 1,
        "text_dim": 128,
        "text_tokens": 16,
    },
    "wan": {
        "dim": 256,
        "heads": 2,
        "layers": 1,
        "ffn_dim": 512,
        "text_dim": 128,
        "text_tokens": 16,
    },
}
"""Sizes of models without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to run our step."""

    policy: str
    """`train.checkpointing`."""
    kernels: str = "triton"
    cuda_graphs: Literal["on", "off"] = "off"
    preset: str = "default"
    """`precision.preset`."""

    def __str__(self) -> str:
        fast = "" if self.preset == "default" else f", {self.preset}"
        replayed = {"off": "", "on": ", replayed"}[self.cuda_graphs]
        return f"{self.policy}{fast}, kernels = {self.kernels}{replayed}"

    @property
    def precision(self) -> Precision:
        """The dtypes of its step, whose matmuls are in bf16."""
        return PrecisionConfig(preset=self.preset).precision(torch.bfloat16, {})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step at one size, ours in several modes."""

    name: str
    family: str
    preset: str
    size: tuple[int, int, int]
    """Frames, height and width in pixels."""
    modes: tuple[Mode, ...]
    theirs: tuple[str, ...] = ()
    """Policies of diffusers that are timed next to it."""
    method: str = "lora"
    blocks: int = 0
    """Number of blocks of Wan; 0 for all."""
    repeats: int = 3
    with_launches: bool = False
    """Whether kernels are counted, which takes the profiler seconds."""


def modes(
    *policies: str,
    kernels: tuple[str, ...] = ("triton",),
    cuda_graphs: tuple[Literal["on", "off"], ...] = ("off",),
) -> tuple[Mode, ...]:
    """All combinations, in order of the policies."""
    pairs = product(policies, kernels, cuda_graphs)
    return tuple(
        Mode(policy=policy, kernels=name, cuda_graphs=graphs) for policy, name, graphs in pairs
    )


BOTH_WAYS: tuple[Literal["on", "off"], ...] = ("on", "off")
EVERY_MODE = modes("none", "full", "attn_only", kernels=("triton", "torch"), cuda_graphs=BOTH_WAYS)
FAST = Mode(policy="full", preset="fast")
LORA, CLIP, LONG_CLIP = 32, (49, 480, 832), (77, 720, 1280)


def flux2(name: str, preset: str, side: int, modes: tuple[Mode, ...], **others: Any) -> Case:
    """A square image of FLUX.2."""
    return Case(
        name=f"{name} {side}x{side}",
        family="flux2",
        preset=preset,
        size=(1, side, side),
        modes=modes,
        **others,
    )


KLEIN, DEV = partial(flux2, "klein 4B", "klein-base-4b"), partial(flux2, "FLUX.2 dev", "dev")
WAN_FULL = partial(Case, family="wan", preset="t2v-1.3b", method="full")
CASES = {
    "klein4b": [
        KLEIN(512, modes("none", "full", cuda_graphs=BOTH_WAYS), theirs=("none", "full"), repeats=7,
        with_launches=True),
        KLEIN(1024, modes("none", "full", cuda_graphs=BOTH_WAYS), theirs=("none", "full"),
        repeats=5),
    ],
    "wan14b": [
        # Steps of seconds differ by less than one in a hundred.
        Case(name="Wan 14B 480x832x49", family="wan", preset="t2v-14b", size=CLIP, theirs=("full",),
        repeats=1,
             modes=(*modes("full", "attn_only"), FAST)),
    ],
    "dev": [
        DEV(512, modes("full", "attn_only", cuda_graphs=BOTH_WAYS), theirs=("full",), repeats=5),
        DEV(1024, modes("full", cuda_graphs=BOTH_WAYS), theirs=("full",)),
    ],
    "klein9b": [
        flux2("klein 9B", "klein-base-9b", side, modes("none", "full", cuda_graphs=BOTH_WAYS),
        theirs=("none", "full"), repeats=5)
        for side in (512, 1024)
    ],
    "wan1_3b": [
        WAN_FULL(name="Wan 1.3B full fine-tune 480x832x77", size=(77, 480, 832),
        modes=(*modes("full", "attn_only"), FAST), repeats=2),
        WAN_FULL(name="Wan 1.3B full fine-tune 720x1280x77", size=LONG_CLIP, modes=modes("full",
        "attn_only(self)", "attn_only"), repeats=1),
    ],
    "klein4b_modes": [KLEIN(side, EVERY_MODE, repeats=5) for side in (512, 1024)],
    "dev_modes": [DEV(side, EVERY_MODE) for side in (512, 1024)],
}  # fmt: skip
"""The cases of each part; those of one part with the same preset share a model."""


def small(case: Case) -> Case:
    """The case without a GPU: two modes of a small clip or image, and one of diffusers', show
    whether everything runs."""
    ends = (replace(mode, kernels="torch") for mode in (case.modes[0], case.modes[-1]))
    size = (min(case.size[0], 5), 64, 64)
    return replace(
        case, size=size, modes=tuple(dict.fromkeys(ends)), theirs=case.theirs[:1], repeats=1
    )


def described(case: Case, tiny: bool) -> tuple[ModelSpec, Any, AdapterConfig, dict[str, Tensor]]:
    """Spec, architecture, adapter and an item on `meta`."""
    if case.family == "wan":
        from ditkit_wan.presets import PRESETS as WAN_PRESETS
        from ditkit_wan.spec import WAN as spec

        arch: Any = WAN_PRESETS[case.preset]
    else:
        from ditkit_flux2.presets import PRESETS as FLUX2_PRESETS
        from ditkit_flux2.spec import FLUX2 as spec

        arch = FLUX2_PRESETS[case.preset]
    if case.blocks:
        arch = replace(arch, layers=case.blocks)
    if tiny:
        arch = replace(arch, **SMALL[case.family])
    adapter = AdapterConfig(method="full") if case.method == "full" else AdapterConfig(rank=LORA)
    with torch.device("meta"):
        item = dict(spec.training.empty_item(arch, case.size, ()))
    return spec, arch, adapter, item
