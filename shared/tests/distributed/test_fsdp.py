"""Two ranks: a sharded model under every policy, collectives inside checkpoints, and what starts
the ranks."""

import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks_of_toy import COMBINATIONS, OTHERS

from ditkit_core.distributed.fsdp import shard
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.testing.ranks import RanksFailed, run_ranks, run_ranks_once
from ditkit_core.testing.sharded_steps import cases, check_step, policies
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.testing.world import make_model

SCRIPT = Path(__file__).parents[1] / "support" / "ranks_of_toy.py"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found."""
    return run_ranks_once(SCRIPT, base=tmp_path_factory.getbasetemp())


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case for trained, dtype in COMBINATIONS for case in cases((trained,), (dtype,))]
    + [f"{trained}/{dtype}/{policy}" for (trained, dtype), policy in OTHERS.items()],
)
def test_policies_change_nothing_under_fsdp(tables: list[Any], case: str) -> None:
    """No bit and no collective; two ranks are one with the joined batch, and every gradient is
    reduced."""
    check_step([table["steps"] for table in tables], case)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "case", [case for trained, dtype in OTHERS for case in cases((trained,), (dtype,))]
)
def test_nor_do_they_with_the_other_dtype(
    tmp_path_factory: pytest.TempPathFactory, case: str
) -> None:
    tables = run_ranks_once(SCRIPT, "others", base=tmp_path_factory.getbasetemp())
    check_step([table["steps"] for table in tables], case)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_sharded_model_recomputes_what_a_whole_one_does(tables: list[Any]) -> None:
    """Of two blocks with two calls of attention each."""
    expected = {
        "none": 4,
        "full": 8,
        "attn_only": 4,
        "attn_only(self)": 6,
        "every_n(2)": 6,
        "full, 0=none": 6,
    }
    found = tables[0]["steps"]
    assert {policy: found[f"lora/bf16/{policy}"]["attention"] for policy in expected} == expected


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(("lora",), ("bf16",)))
def test_prefetching_changes_nothing(tables: list[Any], case: str) -> None:
    """Parameters gathered while the block before runs, no more often, and anew after an update of
    them."""
    check_step([table["prefetched"] for table in tables], case)
    for table in tables:
        assert table["prefetched"][case]["collectives"] == table["steps"][case]["collectives"]
        assert table["prefetched"][case]["attention"] == table["steps"][case]["attention"]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("where", ["whole", "sharded"])
@pytest.mark.parametrize(
    ("way", "kind"), [("functional", "all_to_all_single"), ("in place", "alltoall_base")]
)
def test_collectives_inside_attention_are_kept_with_it(
    tables: list[Any], way: str, kind: str, where: str
) -> None:
    """Two blocks, two calls of attention, four exchanges in each: 16 forward, 16 backward, and what
    a recompute adds."""
    again = {"none": 0, "full": 16, "attn_only": 0, "attn_only(self)": 8}
    for table in tables:
        found = table["attention"][f"{way}/{where}"]
        assert {policy: row["collectives"] for policy, row in found.items()} == {
            p: {kind: 32 + n} for p, n in again.items()
        }
        assert [policy for policy, row in found.items() if row["differs"]] == []


@pytest.mark.ranks
@pytest.mark.slow
def test_attention_over_ranks_is_attention(tables: list[Any]) -> None:
    """The exchanges above are those of sequence parallelism: result and gradients are those of all
    tokens in one process."""
    for table in tables:
        assert max(table["attention is right"].values()) < 1e-6


@pytest.mark.ranks
@pytest.mark.slow
def test_a_collective_outside_of_attention_is_kept_where_it_is_marked(tables: list[Any]) -> None:
    """Two blocks: two sums forward, two backward, and two more where they run again."""
    again = {"none": 0, "full": 2, "full+offload": 2}
    keeping = ("attn_only", "attn_only(self)", "attn_only+offload")
    for table in tables:
        for name, extra in (("marked", 0), ("unmarked", 2)):
            found = table["in an mlp"][name]
            expected = again | dict.fromkeys(keeping, extra)
            assert {p: row["collectives"] for p, row in found.items()} == {
                p: {"all_reduce": 4 + n} for p, n in expected.items()
            }
            assert [policy for policy, row in found.items() if row["differs"]] == []


@pytest.mark.ranks
@pytest.mark.slow
def test_parameters_of_a_rarer_dtype_stay_whole_and_are_averaged_at_once(tables: list[Any]) -> None:
    for table in tables:
        found = table["two dtypes"]
        assert found["whole"] == ["layers.0.mlp.table", "layers.1.mlp.table"]
        assert found["dtypes"] == ["torch.bfloat16", "torch.float32"]
        assert found["unreduced"] == ""
        assert found["apart"] < 3e-2  # gradients are rounded to bf16
        assert found["collectives"] == {"allreduce": 1}
        assert [
            row
            for row in found["again"].values()
            if row != {"differs": [], "collectives": {"allreduce": 1}}
        ] == []


@pytest.mark.ranks
@pytest.mark.slow
def test_whole_parameters_are_averaged_in_every_backward(tables: list[Any]) -> None:
    """Over two backwards that add up, after one that failed; the same average, up to the order of
    additions."""
    for table in tables:
        assert table["whole"]["failed"]
        assert table["whole"]["apart"] < 1e-6


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("without a root", "embed.patch.weight is trained, and neither sharded nor reduced"),
        ("frozen outside", ""),
        ("added later", "later.weight is trained"),
        ("twice", "sharded already"),
        ("on two devices", "on one device, not on 2"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(tables: list[Any], model: str, said: str) -> None:
    found = tables[0]["refused"][model]
    assert (said in found) if said else found == ""
    assert "\n" not in found


def test_sharding_without_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="init_process_group"):
        shard(make_model(TOY, ToyArch()), Precision(matmul=torch.float32))


def test_every_kind_of_policy_is_among_the_cases() -> None:
    from ditkit_core.engine.ac_schedule import MAKERS, parse_schedule

    kinds = {policy.kind for text in policies() for policy in parse_schedule(text).distinct}
    assert kinds == {maker.split("(")[0] for maker in MAKERS} - {"offload"}
    assert len(set(policies())) == len(policies()) and policies()[0] == "none"


def _script(folder: Path, body: str) -> Path:
    file = folder / "script.py"
    file.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    return file


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others_and_is_quoted(tmp_path: Path) -> None:
    """One that were left alone would be waited for, and the message would say so."""
    script = _script(tmp_path, "if rank: sys.exit('the second of two')\ntime.sleep(600)")
    with pytest.raises(RanksFailed, match="(?s)ended with .*the second of two"):
        run_ranks(script, folder=tmp_path / "ranks", grace=0.5)


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_that_take_too_long_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that passes the limit once both ranks wait, however long starting them takes."""
    body = f"print('waiting', flush=True)\nopen(rf'{tmp_path}/{{rank}}', 'w').write(str(os.getpid()))\ntime.sleep(60)"
    script = _script(tmp_path, body)
    pids, asked = [tmp_path / str(rank) for rank in range(2)], itertools.count()

    def clock() -> float:
        began = next(asked) == 0  # the ranks may wait before anybody looks at the clock
        return 0.0 if began else 300.0 * all(pid.exists() and pid.read_text() for pid in pids)

    monkeypatch.setattr(
        "ditkit_core.testing.ranks.time", SimpleNamespace(monotonic=clock, sleep=time.sleep)
    )
    with pytest.raises(RanksFailed, match=r"(?s)not done after 280 s.*waiting"):
        run_ranks(script, folder=tmp_path / "ranks")
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)
