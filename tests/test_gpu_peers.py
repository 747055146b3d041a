"""tools/gpu/gpu_peers.py without the other trainers: random weights in the place of files, and what
a missing checkout costs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workspace import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "gpu"))
    import gpu_peers

    return gpu_peers


def test_weights_are_random_where_a_file_would_have_filled_them(peers: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model[0].to("meta")
    made = peers.randomised(model, CPU, torch.bfloat16)
    assert (
        made[0].weight.dtype == torch.bfloat16
        and 0.005 < made[0].weight.detach().float().std().item() < 0.08
    )
    assert bool((made[1].weight == 1).all()) and made[1].weight.dtype == torch.float32, (
        "what the model itself initialises stays"
    )


def test_every_policy_is_measured_at_every_size_and_one_that_fails_costs_its_own_rows(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = list[tuple[str, str]]()

    def build(case: Any, policy: str, device: Any, tiny: bool) -> Any:
        built.append((case.preset, policy))
        if policy == "none":
            raise RuntimeError("not without checkpointing")
        return lambda case, item: lambda: float(item["latents"].sum() * 0 + 1), nn.Linear(4, 4)

    monkeypatch.setattr(peers, "diffsynth", build)
    rows = list(peers.peers("diffsynth", tmp_path, CPU, True))
    assert built == [
        (peers.CASES[part][0].preset, p)
        for part in ("klein4b", "wan14b")
        for p in peers.POLICIES[part]
    ]
    assert [row["value"] for row in rows if row.get("ok") is False] == [
        "RuntimeError: not without checkpointing"
    ]
    steps = [row["name"] for row in rows if "steps" in row]
    assert steps == [
        "klein 4B 512x512, full",
        "Wan 14B 480x832x49, full",
        "Wan 14B 480x832x49, full+offload",
    ]
    assert all(row["trained"] == 20 for row in rows if "trained" in row)


def test_a_checkout_without_the_trainer_says_so_in_its_rows(peers: Any, tmp_path: Path) -> None:
    import gpu_parts

    given = [
        "musubi",
        "--device",
        "cpu",
        "--tiny",
        "--checkout",
        str(tmp_path),
        "--out",
        str(tmp_path / "rows.jsonl"),
    ]
    assert gpu_parts.main(given) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    failed = [row["value"] for row in rows if row.get("ok") is False]
    assert len(failed) == 2 and set(failed) == {
        "ModuleNotFoundError: No module named 'musubi_tuner'"
    }
