"""Ranks and learning rates by layer in a run: continued, in metrics, in the report and in files."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from toy_world import World, equal


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    return World(tmp_path, captions=0)


def test_ranks_and_rates_by_layer_continue_bitwise_and_are_in_metrics_and_files(
    world: World,
) -> None:
    patterns = (
        "--adapter.rank_pattern", '["qkv=3"]', "--adapter.alpha_pattern", '["layers.0.*=5"]',
        "--optim.lr_pattern", '["layers.1.*=1e-3"]',
        "--optim.loraplus_lr_ratio", "16", "--ema.decay", "0.9",
    )  # fmt: skip
    assert world.train("whole", 4, *patterns) == 0
    assert world.train("parts", 2, *patterns) == 0 and world.train("parts", 4, *patterns) == 0
    whole, parts = (
        load_file(world.folder / name / f"exports/{name}.safetensors")
        for name in ("whole", "parts")
    )
    assert equal(whole, parts)
    ranks = {
        name: len(tensor) for name, tensor in whole.items() if name.endswith("qkv.lora_A.weight")
    }
    assert set(ranks.values()) == {3} and len(ranks) == 2
    lines = [
        json.loads(line)
        for line in (world.folder / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    rates = next(line for line in lines if "lr" in line)
    assert rates["lr layers.1.* B"] == pytest.approx(16e-3) and rates["lr B"] == pytest.approx(
        16 * rates["lr"]
    )
    page = (world.folder / "whole" / "report.html").read_text()
    assert "rank 2 (qkv=3)" in page and "layers.1.*=1e-3" in page and "16 times for B" in page
