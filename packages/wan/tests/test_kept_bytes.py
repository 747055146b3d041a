"""What a tiny Wan keeps under each policy of checkpointing: planned on fake tensors, and counted on real ones."""

from dataclasses import replace

import pytest

from ditkit_core.adapters.inject import AdapterConfig
from ditkit_core.testing.plans import KEPT, SENT, check_kept, check_sent, step_of
from ditkit_wan.presets import WanArch
from ditkit_wan.spec import WAN

ARCH = WanArch(
    dim=48, ffn_dim=64, heads=2, layers=4, in_channels=4, out_channels=4, text_dim=20, text_tokens=6, freq_dim=16
)


@pytest.mark.parametrize(
    "policy",
    [
        "attn_only, 1-2=full",
        "ops(matmul, attention)",
        *(
            pytest.param(policy, marks=pytest.mark.exhaustive)
            for policy in ("none", "full", "attn_only", "attn_only(self)")
        ),
    ],
)
def test_blocks_keep_what_is_planned(policy):
    check_kept(replace(step_of(WAN, ARCH, (5, 128, 128), AdapterConfig(rank=4)), policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "method"), KEPT)
def test_so_they_do_where_all_is_trained_and_under_other_policies(policy, method):
    check_kept(replace(step_of(WAN, ARCH, (5, 128, 128), AdapterConfig(method=method, rank=4)), policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", SENT)
def test_blocks_send_what_is_planned(policy):
    check_sent(
        replace(step_of(WAN, replace(ARCH, dim=576, ffn_dim=576), (13, 256, 256), AdapterConfig(rank=4)), policy=policy)
    )
