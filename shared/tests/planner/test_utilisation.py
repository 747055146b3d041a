"""Model FLOPs utilisation: the planner's count of the arithmetic that a step needs, whatever is
recomputed."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from toy_jobs import toy_job
from toy_world import World

from ditkit_core.data.config import DataConfig
from ditkit_core.distributed.ranks import RanksConfig
from ditkit_core.encoding.config import EncodeConfig
from ditkit_core.models.paths import ModelPaths
from ditkit_core.models.precision import Precision
from ditkit_core.planner.gpus import parse_gpus
from ditkit_core.planner.step_time import Utilisation, flops_of
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.run.encoding import encode_samples
from ditkit_core.run.plans.planned_step import utilisation_of_run
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.training.optim.optimizers import OptimConfig

ARCH = ToyArch(dim=64, depth=3)


def item(frames: int, height: int, width: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return TOY.training.empty_item(ARCH, (frames, height, width), ())


def utilisation(*sizes: tuple[int, int, int], peak: float = 1e9) -> Utilisation:
    job, num_tokens = toy_job(arch=ARCH, checkpointing="full"), TOY.training.num_tokens
    items = {num_tokens(each): each for each in (item(*size) for size in sizes)}
    return Utilisation(items, lambda each: flops_of(job, each), num_tokens, peak)


@pytest.mark.slow
def test_a_quadratic_through_three_sizes_is_the_count_of_any_other() -> None:
    found = utilisation((1, 32, 32), (5, 64, 64), (9, 64, 96))
    job = toy_job(arch=ARCH)
    for size in ((9, 96, 96),):
        own = item(*size)
        assert found.flops(TOY.training.num_tokens(own)) == pytest.approx(
            flops_of(job, own), rel=1e-9
        )


def test_recomputes_and_micro_batches_do_not_count() -> None:
    own = item(5, 64, 64)
    plain = flops_of(toy_job(arch=ARCH), own)
    assert flops_of(toy_job(arch=ARCH, checkpointing="full", micro_batches=4), own) == plain
    counted = utilisation((5, 64, 64), peak=1e9)
    assert counted.flops(TOY.training.num_tokens(own)) == plain
    assert counted([own] * 3, 6.0) == pytest.approx(3 * plain / (6 * 1e9))


def test_an_optimizer_in_the_backward_does_not_count() -> None:
    """Muon's updates are products of matrices."""
    own, muon = item(5, 64, 64), OptimConfig(name="muon", fused_backward=True)
    assert flops_of(toy_job("full", arch=ARCH, optim=muon, clip_norm=0.0), own) == flops_of(
        toy_job("full", arch=ARCH), own
    )


def test_ranks_that_share_a_sample_count_all_of_it() -> None:
    """`mfu` of a run divides by them."""
    job = toy_job("lora", arch=ARCH)
    assert flops_of(job.with_execution(ranks=RanksConfig(context=2)), item(5, 64, 64)) == flops_of(
        job, item(5, 64, 64)
    )


def test_the_count_is_that_of_a_real_step() -> None:
    """By torch's own counter, with all weights trained."""
    model = TOY.architecture.build(ARCH, Precision(matmul=torch.float32))
    own = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in item(5, 64, 64).items()
    }
    inputs = TOY.training.make_inputs(
        [torch.randn(own["latents"].shape)], torch.tensor([0.5]), [own], 1.0
    )
    with FlopCounterMode(display=False) as counter:
        model(inputs)[0].square().mean().backward()
    assert flops_of(toy_job("full", arch=ARCH), item(5, 64, 64)) == pytest.approx(
        counter.get_total_flops(), rel=0.01
    )


def test_a_run_on_gpus_counts_its_own_step_by_their_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    data = DataConfig(folder=str(tmp_path / "clips"), frames=1, height=16, width=16)
    model = ModelPaths(preset="tiny", transformer=str(tmp_path / "toy.safetensors"))
    config = RunConfig(data=data, model=model, encode=EncodeConfig(cache=str(tmp_path / "cache")))
    run = create_run(world.spec, config)
    samples = encode_samples(run.data, run.data.dataset.samples, 16.0)
    assert utilisation_of_run(run, samples) is None, "the rate of a CPU is unknown"
    monkeypatch.setitem(vars(run), "devices", (torch.device("cuda:0"), torch.device("cuda:1")))
    monkeypatch.setattr(
        "ditkit_core.run.plans.planned_step.gpus_here",
        lambda devices: parse_gpus("rtx4090,rtx3090"),
    )
    found = utilisation_of_run(run, samples)
    assert found is not None and found.peak == 165.2e12 + 71e12 and len(found.sizes) == 1
    assert 0 < found([samples[0].load()], 1.0) < 1
