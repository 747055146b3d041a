"""Runs with levers of other trainers that are killed in the midst of a step, and go on bitwise."""

from pathlib import Path

import pytest
from media_files import picture
from toy_world import World, equal

METHODS = {
    "lora": ("--optim.loraplus_lr_ratio", "4", "--optim.lr_pattern", '["layers.0.*=1e-3"]'),
    "dora": ("--adapter.use_dora", "true"),
    "lokr": ("--adapter.method", "lokr", "--adapter.dropout", "0"),
    "loha": ("--adapter.method", "loha", "--adapter.dropout", "0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_goes_on_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """With masks, an assistant, matched steps, an adapter for samples alone, and an average."""
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert (
        world.train(
            "donor",
            1,
            "--adapter.targets",
            '["qkv"]',
            "--optim.lr",
            "0.5",
            "--sample.captions",
            "0",
        )
        == 0
    )
    file = str(tmp_path / "donor" / "exports" / "donor.safetensors")
    for i in range(5):
        picture(tmp_path / "masks" / f"{i}.png", (16, 16), "gray")
    switches = {
        "masks": ("--data.masks", "masks"),
        "assistant": ("--base.assistant", f"{file}@0.5"),
        "matched": ("--prior.match_base", "0.5"),
        "method": METHODS[method],
    }
    common = (
        "--sample.adapter",
        file,
        "--ema.decay",
        "0.9",
        "--save.every_steps",
        "2",
        "--train.accumulation",
        "2",
    )
    common += (
        "--export.dtype",
        "fp32",
        "--optim.lr",
        "1e-2",
        "--adapter.targets",
        '["qkv"]',
        "--sample.captions",
        "1",
    )

    def train(name: str, steps: int = 5, without: str = "") -> int:
        chosen = [flag for switch, flags in switches.items() if switch != without for flag in flags]
        return world.train(name, steps, *common, *chosen)

    assert train("whole") == 0
    saved = tmp_path / "killed" / "state" / "step-000002"
    world.kill(lambda: train("killed"), saved)
    assert max(saved.parent.glob("step-*")) == saved
    assert train("killed") == 0
    assert equal(world.adapter("whole"), world.adapter("killed"))
    images = [
        sorted(tmp_path.joinpath(name, "samples").glob("*.png")) for name in ("whole", "killed")
    ]
    assert images[0] and [one.read_bytes() for one in images[0]] == [
        other.read_bytes() for other in images[1]
    ]
    for switch in switches:
        assert train(f"no {switch}", without=switch) == 0
        assert not equal(world.adapter("whole"), world.adapter(f"no {switch}")), (
            f"{switch} did nothing"
        )
