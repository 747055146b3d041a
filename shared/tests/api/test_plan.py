"""A step planned by the door: of a preset or of files, at a size, and changed until it fits."""

from pathlib import Path

import pytest
from safetensors.torch import save_file

from ditkit_core.adapters.config import LoraConfig
from ditkit_core.api.load import load
from ditkit_core.api.plan import plan
from ditkit_core.errors import UserError
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, official_name
from ditkit_core.testing.world import make_model

WIDE = ToyArch(dim=2048, heads=16, depth=24)
SPEC = altered(TOY, presets={"wide": WIDE, "tiny": ToyArch()})
LORA, SIZE = LoraConfig(r=4), (17, 256, 256)


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_a_preset_is_planned_at_a_size_and_with_a_batch() -> None:
    small = plan(SPEC, "wide", "24GiB", LORA, size=(5, 64, 64), batch_size=2, micro_batches=3)
    large = plan(SPEC, "wide", "24GiB", LORA, size=SIZE)
    assert small.fits and small.devices[0].peak < large.devices[0].peak
    assert len(small.job.batch) == 2 and small.work.micro_batches == 3
    with pytest.raises(UserError, match="batch_size = 0 must be at least 1"):
        plan(SPEC, "wide", "24GiB", batch_size=0)


@pytest.mark.usefixtures("equal_steps_are_profiled_once")
def test_what_does_not_fit_is_changed_until_it_does() -> None:
    asked = plan(SPEC, "wide", "6GiB", LORA, size=SIZE)
    assert not asked.fits
    fitting = plan(SPEC, "wide", "6GiB", LORA, size=SIZE, fit=True)
    assert fitting.fits and fitting.job.execution != asked.job.execution
    with pytest.raises(UserError, match="nothing fits: the fullest GPU, or the host, still lacks"):
        plan(SPEC, "wide", "2GiB", LORA, size=SIZE, fit=True)


def test_a_budget_of_checkpointing_is_resolved_for_the_blocks(tmp_path: Path) -> None:
    file = tmp_path / "toy.safetensors"
    state = make_model(TOY, ToyArch()).state_dict()
    save_file({official_name(name): tensor.contiguous() for name, tensor in state.items()}, file)
    model = load(SPEC, file, LORA, dtype="fp32", devices=("cpu",), checkpointing="budget")
    assert model.engine.schedule.budget is None


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((21, 61, 104), "height = 61 is not a multiple of 4; set 60 or 64"),
        ((21, 60, 2), "width = 2 is not a multiple of 4"),
        ((20, 64, 64), "frames = 20 is not 1 \\+ k \\* 4; set 17 or 21"),
        ((64, 64), "must be three whole numbers above 0"),
        ((0, 64, 64), "must be three whole numbers above 0"),
        ((5, 64.0, 64), "must be three whole numbers above 0"),
    ],
)
def test_a_size_that_no_sample_has_is_one_line(size: tuple[int, int, int], said: str) -> None:
    with pytest.raises(UserError, match=f"^size = .*{said}"):
        plan(SPEC, "tiny", "24GiB", LORA, size=size)
