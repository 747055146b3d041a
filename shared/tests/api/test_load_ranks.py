"""A model whose weights ranks divide trains in a loop of one's own as in one process, and in a
Trainer too."""

from pathlib import Path

import pytest
import torch
from own_loop_of_toy import LORA, SPEC, Data, base_of, trained
from safetensors.torch import load_file

from ditkit_core.adapters.config import AdapterConfig
from ditkit_core.api.load import load
from ditkit_core.testing.ranks import run_ranks
from ditkit_core.training.config import TrainConfig
from ditkit_core.training.trainer import Trainer, TrainerConfig

SCRIPT = Path(__file__).parents[1] / "support" / "own_loop_of_toy.py"


@pytest.mark.ranks
@pytest.mark.slow
def test_two_ranks_train_what_one_process_does(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    tables = run_ranks(SCRIPT, str(tmp_path), folder=tmp_path / "ranks")
    for name, adapter in (("lora", LORA), ("lokr", AdapterConfig(method="lokr", rank=2))):
        alone = trained(load(SPEC, base, adapter, dtype="fp32"), range(2))
        expected = load_file(alone.save_adapter(tmp_path / "alone.safetensors", dtype="fp32"))
        found = load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == expected.keys()
        # Sums of two ranks are rounded in another order than those of two backwards.
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-5, atol=1e-6)
        divided, local, total = tables[0][name]
        assert divided and local < total and local + tables[1][name][1] == total
    model = load(SPEC, base, LORA, dtype="fp32")
    config = TrainerConfig(train=TrainConfig(steps=2, accumulation=2))
    assert (
        Trainer(model, Data(), config, folder=tmp_path / "one").fit().step == tables[0]["step"] == 2
    )
    expected = load_file(model.save_adapter(tmp_path / "one.safetensors", dtype="fp32"))
    for key, tensor in load_file(tmp_path / "trainer.safetensors").items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-5, atol=1e-6)
