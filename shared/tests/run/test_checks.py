"""What a run of several ranks refuses, before anything is loaded."""

import re
from random import Random

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from ditkit_core.adapters.config import AdapterConfig, BaseConfig
from ditkit_core.config.resolve import resolve
from ditkit_core.distributed import fsdp
from ditkit_core.distributed.ranks import Ranks, RanksConfig
from ditkit_core.encoding.config import EncodeConfig
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision
from ditkit_core.models.token_streams import TokenStreams
from ditkit_core.run.checks import check_ranks
from ditkit_core.run.config import RunConfig
from ditkit_core.run.context import create_run
from ditkit_core.testing.conformance_quantized import make_quantized
from ditkit_core.testing.toy import TOY, ToyArch
from ditkit_core.training.config import TrainConfig
from ditkit_core.training.optim.optimizers import OPTIMIZERS, OptimConfig


def run(*, context: int = 2, **sections: object):
    config = RunConfig(
        **{"train": TrainConfig(accumulation=2), "ranks": RanksConfig(context=context)} | sections
    )
    return create_run(TOY, config, ToyArch())


WHOLE = ("adafactor", "muon", "prodigy", "adamw8bit")
"""Optimizers that `ranks.shard` cannot have, of all that there are."""


def test_every_other_optimizer_is_taken():
    """Rows are enough for these; replicas and context groups have whole weights, and take each."""
    assert set(OPTIMIZERS) >= set(WHOLE)
    for name in OPTIMIZERS:
        check_ranks(run(optim=OptimConfig(name=name, lr=1.0)), 2)
        if name not in WHOLE:
            check_ranks(run(ranks=RanksConfig(shard=2), optim=OptimConfig(name=name, lr=1.0)), 2)


@pytest.mark.parametrize("context, size", [(1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8)])
def test_sizes_that_fit_are_taken(context, size):
    check_ranks(run(context=context), size)


@pytest.mark.parametrize(
    "given, size, said",
    [
        (run(context=4), 1, r"ranks.context = 4 .* this run has one; start it with torchrun --nproc-per-node 4"),
        (run(context=2), 6, r"2 micro-batches a step in all, too few for 3 groups of 2 ranks; set train.accumulation to 3 .* at most 4 processes"),
        (run(context=1), 3, r"2 micro-batches a step in all, too few for 3 ranks; .* at most 2 processes"),
        (run(ranks=RanksConfig(shard=3)), 4, r"ranks.shard = 3 does not divide this run's 4 processes; .* set ranks.shard to 1 or 2 or 4"),
        (run(ranks=RanksConfig(shard=8)), 1, r"ranks.shard = 8 does not divide this run's 1 process; start a multiple of it"),
        *((run(ranks=RanksConfig(shard=2), optim=OptimConfig(name=name, lr=1.0)), 2, rf"{name} needs whole weights .* use adamw or schedule") for name in WHOLE),
        (run(ranks=RanksConfig(shard=2), train=TrainConfig(accumulation=2, swap_blocks=(1,))), 2, r"train.swap_blocks streams whole weights"),
        (run(ranks=RanksConfig(shard=2), train=TrainConfig(accumulation=2, clip_by="block")), 2, r"train.clip_by = block needs whole gradients"),
        (run(ranks=RanksConfig(shard=2), train=TrainConfig(accumulation=2, checkpointing="budget(20GiB)")), 2, r"name a policy, such as full"),
        (run(context=1, train=TrainConfig(accumulation=2, devices=("cuda:0", "cuda:1"))), 2, r"train.devices = .* each on one GPU; leave it out"),
        (run(context=1, train=TrainConfig(accumulation=2, device="cuda:1")), 2, r"train.device = 'cuda:1' is one GPU, .* leave it out"),
        (run(context=1, train=TrainConfig(accumulation=2, pipelined=True)), 2, r"train.pipelined overlaps the devices .* leave it out"),
        (run(context=1, encode=EncodeConfig(device="cuda:1")), 2, r"encode.device = 'cuda:1' is one GPU, .* set it to auto or cpu"),
        (run(context=1, optim=OptimConfig(fused_backward=True)), 2, r"optim.fused_backward updates weights before .* set it to false"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(given, size, said):
    with pytest.raises(UserError) as refused:
        check_ranks(given, size)
    assert re.search(said, str(refused.value)) and "\n" not in str(refused.value)


def test_weights_in_bf16_are_not_divided_by_a_torch_that_rounds_their_gradients(monkeypatch):
    given = {
        "ranks": RanksConfig(shard=2),
        "adapter": AdapterConfig(method="full"),
        "optim": OptimConfig(rounding="stochastic"),
    }
    assert fsdp.keeps_wide_gradients() or torch.__version__ < (2, 15)
    monkeypatch.setattr(fsdp, "keeps_wide_gradients", lambda: True)
    check_ranks(run(**given), 2)
    monkeypatch.setattr(fsdp, "keeps_wide_gradients", lambda: False)
    with pytest.raises(
        UserError,
        match=r"ranks.shard = 2 with trained weights in bf16: this torch, .* set model.dtype = fp32$",
    ):
        check_ranks(run(**given), 2)
    check_ranks(run(**given | {"adapter": AdapterConfig()}), 2)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_of_integers_is_not_divided_by_a_torch_that_shards_none(monkeypatch, kind):
    given = {"ranks": RanksConfig(shard=2), "base": BaseConfig(quantize=kind)}
    assert fsdp.shards_integers() == (torch.__version__ >= (2, 12)), (
        "by the versions that were tried"
    )
    monkeypatch.setattr(fsdp, "shards_integers", lambda: True)
    check_ranks(run(**given), 2)
    monkeypatch.setattr(fsdp, "shards_integers", lambda: False)
    with pytest.raises(
        UserError, match=rf"a base in {kind}: this torch, .* set base.quantize to fp8 or none$"
    ):
        check_ranks(run(**given), 2)
    check_ranks(run(**given | {"base": BaseConfig(quantize="fp8")}), 2)
    model = make_quantized(TOY, ToyArch(dim=64), kind, adapter=AdapterConfig(rank=4))
    with pytest.raises(
        UserError, match="cannot shard a base in integers; update it, or use one in fp8"
    ):
        fsdp.divide(model, Precision(), DeviceMesh.__new__(DeviceMesh))


def test_random_tables_train_or_are_refused_in_one_line(tmp_path):
    """Whatever `[ranks]` says, for any number of processes: what is taken gives every micro-batch
    to one group of ranks."""
    random, file, taken, refused = Random(7), tmp_path / "run.toml", 0, 0
    numbers = [1, 1, 2, 2, 3, 4, 6, 8, 0, -1, 10**9, 2.5, '"2"', "true", "[2]"]
    keys = ["shard", "context", "timeout", "shards"]
    for _ in range(200):
        chosen = random.sample(keys, random.randint(0, 3))
        table = "".join(f"{key} = {random.choice(numbers)}\n" for key in chosen)
        size, accumulation = random.randint(1, 8), random.randint(1, 8)
        file.write_text(f"[ranks]\n{table}[train]\naccumulation = {accumulation}\n")
        try:
            config = resolve(RunConfig, file=file)
            check_ranks(create_run(TOY, config, ToyArch()), size)
            if size % config.ranks.context:  # refused when the ranks are grouped
                Ranks(0, size).grouped(config.ranks.context)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) > 20
            refused += 1
            continue
        ranks, groups = config.ranks, size // config.ranks.context
        assert size % ranks.shard == 0 == size % ranks.context and accumulation >= groups
        shares = [
            Ranks(rank, size, context=ranks.context).share(accumulation) for rank in range(size)
        ]
        assert sorted(item for share in shares[:: ranks.context] for item in share) == list(
            range(accumulation)
        )
        taken += 1
    assert taken > 20 and refused > 20


def test_a_model_whose_blocks_need_all_tokens_is_refused(monkeypatch):
    given = run()
    assert isinstance(TOY.architecture.token_streams(given.arch), TokenStreams)
    monkeypatch.setitem(vars(given.spec.architecture), "token_streams", lambda arch: None)
    with pytest.raises(
        UserError,
        match=r"blocks of this architecture read groups of tokens; leave ranks.context out",
    ):
        check_ranks(given, 2)
