"""Mixed precision of FSDP2 and recomputes: what goes wrong with casts at the boundary of a block,
and that explicit casts do not care.

Up to torch 2.12, FSDP2 cast a block's inputs in its forward and not in its recompute. That is
emulated in the ranks (`toy_islands.py`).
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ditkit_core.engine.engine import BlockEngine
from ditkit_core.testing.ranks import run_ranks_once
from ditkit_core.testing.sharded_steps import apart, differences, policies, step_of
from ditkit_core.testing.toy import TOY, ToyArch, ToyBlock, toy_items

SCRIPT = Path(__file__).parents[1] / "support" / "ranks_of_toy.py"
sys.path.insert(0, str(SCRIPT.parent))
from toy_islands import IslandBlock, model_of

sys.path.pop(0)

_IS_PAST = torch.__version__ < (2, 12)
"""Whether this torch is what `past` pretends: its FSDP2 does not cast in a recompute."""


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found."""
    return run_ranks_once(SCRIPT, base=tmp_path_factory.getbasetemp())


@pytest.mark.ranks
@pytest.mark.slow
def test_islands_of_autocast_fail_where_a_recompute_is_not_cast(tables: list[Any]) -> None:
    for table in tables:
        said = table["written otherwise"]["islands/past"]["error"]
        assert "have different metadata than during the forward pass" in said
        assert "torch.bfloat16" in said and "torch.float32" in said
        if not _IS_PAST:
            assert table["written otherwise"]["islands/present"]["error"] == ""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_block_that_widens_what_it_is_given_is_silently_wrong_there(tables: list[Any]) -> None:
    for table in tables:
        past, present = (
            table["written otherwise"][f"weights' dtype/{fsdp}"] for fsdp in ("past", "present")
        )
        assert past["error"] == present["error"] == ""
        assert len(past["differs"]) > 20 and past["apart"] > 1e-3
        assert _IS_PAST or present["differs"] == []
        assert not table["dtypes with casts"], "its recompute runs on other dtypes"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("policy", policies())
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fsdp", ["past", "present"])
def test_ours_recomputes_every_operation_in_its_dtype(
    tables: list[Any], fsdp: str, dtype: str, policy: str
) -> None:
    for table in tables:
        found = table["ours"][f"{fsdp}/{dtype}"][policy]
        assert found["differs"] == []
        assert found["alike"]
        assert found["loss"] == table["ours"][f"present/{dtype}"]["none"]["loss"]
        blocks = {"none": 0, "none+offload": 0, "every_n(2)": 1, "full, 0=none": 1}.get(policy, 2)
        assert found["recomputed"] == blocks


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 0.0), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"]
)
def test_explicit_casts_are_as_good_as_islands_after_30_blocks(
    dtype: torch.dtype, bound: float
) -> None:
    """Loss and gradients; in fp32 bitwise."""
    arch, items = ToyArch(depth=30), toy_items(2)
    found, expected = (
        step_of(TOY, model_of(block, dtype, arch), items, BlockEngine(), of=2)
        for block in (ToyBlock, IslandBlock)
    )
    assert bound or differences(found, expected) == []
    assert apart(found, expected) <= bound
    assert (found["loss"] - expected["loss"]).abs() <= bound * expected["loss"].abs()
