"""What a tiny FLUX.2 keeps under each policy of checkpointing: planned on fake tensors, and counted on real ones."""

from dataclasses import replace

import pytest

from ditkit_core.adapters.inject import AdapterConfig
from ditkit_core.testing.plans import KEPT, SENT, check_kept, check_sent, step_of
from ditkit_flux2.presets import Flux2Arch
from ditkit_flux2.spec import FLUX2

ARCH = Flux2Arch(
    dim=32, heads=2, double_layers=2, single_layers=3, text_dim=12, text_tokens=5, guidance=True, in_channels=6,
    out_channels=6, freq_dim=16, axes=(4, 4, 4, 4),
)  # fmt: skip


@pytest.mark.parametrize(
    "policy",
    [
        "attn_only, 1-3=full",
        *(
            pytest.param(policy, marks=pytest.mark.exhaustive)
            for policy in ("none", "full", "attn_only", "ops(matmul, attention)")
        ),
    ],
)
def test_blocks_keep_what_is_planned(policy):
    check_kept(replace(step_of(FLUX2, ARCH, (1, 256, 256), AdapterConfig(rank=4)), policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "method"), KEPT)
def test_so_they_do_where_all_is_trained_and_under_other_policies(policy, method):
    check_kept(replace(step_of(FLUX2, ARCH, (1, 256, 256), AdapterConfig(method=method, rank=4)), policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", SENT)
def test_blocks_send_what_is_planned(policy):
    check_sent(
        replace(
            step_of(FLUX2, replace(ARCH, dim=512, axes=(64, 64, 64, 64)), (1, 512, 512), AdapterConfig(rank=4)),
            policy=policy,
        )
    )
