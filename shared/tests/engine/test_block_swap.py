"""Streamed weights: which blocks, what is there when, and runs that do not notice."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from bare_base import base_in_form
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from toy_world import World, equal

from ditkit_core.adapters.config import AdapterConfig, ExportConfig
from ditkit_core.adapters.files.export import export_merged
from ditkit_core.adapters.inject import inject
from ditkit_core.engine.block_swap import BlockSwap, choose_streamed
from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.engine.pinned_memory import page_lock, unlock
from ditkit_core.engine.placement import Placement
from ditkit_core.errors import UserError
from ditkit_core.models.precision import Precision, compute_fp32_in_fp32
from ditkit_core.nn.quantized_linear import quantized_weights
from ditkit_core.planner.memory_tracker import MemoryTracker
from ditkit_core.testing.combinations import daily
from ditkit_core.testing.conformance_quantized import KINDS, make_quantized
from ditkit_core.testing.conformance_streams import place_model
from ditkit_core.testing.conformance_swap import SwapChecks, Watched, stream
from ditkit_core.testing.full_size import DEVICE, materialise
from ditkit_core.testing.pretend_devices import PretendDevices
from ditkit_core.testing.specs import altered
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model, outcome, train_shortly

CPU, OTHER = torch.device("cpu"), torch.device("cpu:1")
LORA = AdapterConfig(rank=4, dropout=0.2)


class Four(SwapChecks):
    """The models of the conformance checks have two blocks or three."""

    spec = TOY
    arch = ToyArch(depth=4, dropout=0.1)

    def items(self, count, ragged=False):
        return toy_items(count, ragged=ragged)


@pytest.mark.parametrize("policy", daily(POLICIES, "attn_only"))
def test_four_blocks_pass_what_every_model_passes(policy):
    checks = Four()
    checks.test_streaming_changes_no_bit(("lora with dropout", "every other"), policy)
    checks.test_one_backward_over_several_streamed_forwards(policy, "every other")
    checks.test_a_streamed_model_trains_and_measures_alike_on_two_devices(policy)


def placed(*devices, streamed=()):
    return Placement(
        embed=devices[0], blocks=devices, head=devices[-1], streamed=frozenset(streamed)
    )


# Which blocks


@pytest.mark.parametrize(
    ("counts", "chosen"),
    [
        ((), set()),
        ((0,), set()),
        ((1,), {5}),
        ((2,), {2, 5}),
        ((3,), {1, 3, 5}),
        ((5,), {1, 2, 3, 4, 5}),
        ((6,), {*range(6)}),
    ],
)
def test_streamed_blocks_are_spread_evenly(counts, chosen):
    assert choose_streamed(placed(*[CPU] * 6), counts, [True] * 6) == chosen


def test_every_device_streams_its_own_number_and_no_block_without_weights():
    division = placed(*[CPU] * 4, *[OTHER] * 3)
    has_weights = [True, True, False, True, True, True, True]
    assert choose_streamed(division, (3, 0), has_weights) == {0, 1, 3}
    assert choose_streamed(division, (0, 1), has_weights) == {6}
    assert choose_streamed(division, (1,), has_weights) == {3, 6}


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((4, 0), "cpu runs 3 blocks; choose 0 to 3"),
        ((-1,), "choose 0 to 3"),
        ((1, 1, 1), "3 numbers for 2 devices; give one for each"),
        ((3,), "cpu:1 runs 2"),
    ],
)
def test_counts_that_fit_no_device_are_refused(counts, says):
    with pytest.raises(UserError, match=says) as error:
        choose_streamed(placed(*[CPU] * 3, OTHER, OTHER), counts, [True] * 5)
    assert "\n" not in str(error.value)


# What is there when


class Early(BlockSwap):
    """Empties a block before its backward instead of after it."""

    def pre_backward(self, index, block):
        super().pre_backward(index - 1, block) if index else super().pre_backward(index, block)


class Forgetful(BlockSwap):
    """Is told nothing of backward."""

    def pre_backward(self, index, block):
        pass


class Late(BlockSwap):
    """Never empties anything."""

    def pre_forward(self, index, block):
        for queue in self._queues.values():
            queue._keep_only = lambda *indices: None
        super().pre_forward(index, block)


@pytest.mark.parametrize("policy", ["none", "full", "attn_only"])
@pytest.mark.parametrize("wrong", [Early, Forgetful])
def test_weights_that_go_too_early_are_seen(wrong, policy, monkeypatch):
    model = make_model(TOY, ToyArch(depth=4), adapter=LORA)
    monkeypatch.setattr("ditkit_core.testing.conformance_swap.BlockSwap", wrong)
    swap = stream(model)
    seen = pytest.raises(
        (AssertionError, RuntimeError),
        match="weights that are not there|out of bounds for storage of size 0",
    )
    with seen, Watched(swap):
        outcome(TOY, model, toy_items(2), BlockEngine(policy=policy, hooks=(swap,)))


def test_weights_that_stay_are_seen(monkeypatch):
    model = make_model(TOY, ToyArch(depth=4), adapter=LORA)
    monkeypatch.setattr("ditkit_core.testing.conformance_swap.BlockSwap", Late)
    swap = stream(model)
    with Watched(swap) as watch:
        outcome(TOY, model, toy_items(2), BlockEngine(hooks=(swap,)))
    assert watch.most == 4


def test_a_step_that_failed_leaves_nothing_for_good():
    model = make_model(TOY, ToyArch(depth=4), adapter=LORA)
    plain = outcome(TOY, model, toy_items(2), BlockEngine())
    swap = stream(model)

    def fail(gradient):
        raise RuntimeError("as out of memory")

    handle = model.layers[1].out.lora_A["default"].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="as out of memory"):
        outcome(TOY, model, toy_items(2), BlockEngine(hooks=(swap,)))
    handle.remove()
    assert outcome(TOY, model, toy_items(2), BlockEngine(hooks=(swap,))).differences(plain) == []
    assert not Watched(swap).there()


class Oddments(nn.Module):
    """Frozen tensors of every kind."""

    def __init__(self):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.wide = nn.Parameter(torch.randn(5, 3, generator=random), requires_grad=False)
        self.same = self.wide
        self.turned = nn.Parameter(torch.randn(3, 5, generator=random).T, requires_grad=False)
        self.one = nn.Parameter(torch.tensor(2.5), requires_grad=False)
        self.trained = nn.Parameter(torch.randn(3, generator=random))
        self.register_buffer("bytes_", torch.arange(7, dtype=torch.int8))
        self.register_buffer("packed", torch.arange(9, dtype=torch.uint8))
        self.register_buffer("eighth", torch.randn(4, generator=random).to(torch.float8_e4m3fn))
        self.register_buffer("every_other", torch.arange(10.0)[::2])
        self.register_buffer("nothing", torch.empty(0, 4))


def test_frozen_tensors_of_every_kind_are_streamed():
    class Model:
        def __init__(self):
            self.layers = [Oddments(), Oddments()]

        def blocks(self):
            return self.layers

    model, before = Model(), Oddments().state_dict()
    trained = model.layers[0].trained
    swap = BlockSwap(model, placed(CPU, CPU, streamed=(0, 1)))
    (odd, _) = model.layers
    assert (
        odd.trained is trained
        and odd.wide is odd.same
        and odd.turned.stride() == before["turned"].stride()
    )
    assert not odd.wide.untyped_storage().nbytes()
    assert all(
        isinstance(p, nn.Parameter) and not p.requires_grad
        for name, p in odd.named_parameters()
        if name != "trained"
    )
    offsets = {
        tensor.storage_offset() * tensor.element_size() % 256
        for name, tensor in odd.state_dict().items()
        if name != "trained"
    }
    assert offsets == {0}
    versions = [tensor._version for tensor in odd.state_dict().values()]
    swap.pre_forward(0, odd)
    assert [tensor._version for tensor in odd.state_dict().values()] == versions, (
        "autograd would complain"
    )
    with swap.on_host():
        hosts = odd.state_dict()
    for name, tensor in odd.state_dict().items():
        assert torch.equal(tensor.float(), before[name].float()), name
        assert torch.equal(hosts[name].float(), before[name].float()), name


# other pairs: `LeverChecks`
@pytest.mark.parametrize(("kind", "policy"), list(zip(KINDS, POLICIES, strict=True)))
def test_a_quantized_base_is_streamed_bitwise(kind, policy):
    """Codes and scales are streamed, and there whenever a weight is dequantized, in the backward
    and in a recompute, too."""
    make = partial(
        make_quantized, TOY, ToyArch(depth=4, dim=64), kind, dtype=torch.bfloat16, adapter=LORA
    )
    items, model = toy_items(2, ragged=True), make()
    plain = outcome(TOY, model, items, BlockEngine(policy=policy))
    swap = stream(model)
    assert not any(
        p.untyped_storage().nbytes()
        for layer in quantized_weights(model).values()
        for p in layer.values().values()
    )
    with Watched(swap) as watch:
        under = outcome(TOY, model, items, BlockEngine(policy=policy, hooks=(swap,)))
    assert quantized_weights(model) and under.differences(plain) == []
    assert watch.most == 2 and watch.returned == 0


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_streamed_model_is_merged_as_another(tmp_path, use_dora):
    model = make_model(
        TOY,
        ToyArch(depth=3),
        dtype=torch.bfloat16,
        adapter=AdapterConfig(rank=4, use_dora=use_dora),
    )
    spec = altered(
        TOY,
        names=replace(
            TOY.architecture.names,
            from_native={"official": TOY.architecture.names.from_native["official"]},
        ),
    )
    export_merged(model, spec, tmp_path / "plain", ExportConfig(), metadata={})
    swap = stream(model)
    with swap.on_host():
        export_merged(model, spec, tmp_path / "swapped", ExportConfig(), metadata={})
    written = [path.read_bytes() for path in sorted(tmp_path.rglob("*.safetensors"))]
    assert len(written) == 2 and written[0] == written[1]
    assert not Watched(swap).there()


def test_buffers_go_with_the_swap():
    model = make_model(TOY, ToyArch(depth=2), adapter=LORA)
    swap = stream(model)
    host = weakref.ref(swap.host_buffers[0].untyped_storage())
    del swap, model
    gc.collect()
    assert host() is None


# A plan's run


@pytest.mark.slow
def test_fake_weights_stream_and_are_counted():
    """What a planner runs: another device than the host, whose peak has two blocks of weights where
    it had all."""
    peaks, streamed_bytes = [], 0
    for streamed in ((), range(6)):
        with torch.device("meta"):
            model = TOY.architecture.build(ToyArch(depth=6, dim=128), Precision())
            inject(model, replace(LORA, dropout=0.0), TOY.adapters.targets)
        with FakeTensorMode(), MemoryTracker() as ledger:
            materialise(model, TOY)
            swap = BlockSwap(model, placed(*[DEVICE] * 6, streamed=streamed))
            ledger.track(model, "weights")
            for buffer in swap.buffers:
                ledger.watch(buffer)
            latents = torch.empty(4, 1, 2, 2, device=DEVICE)
            inputs = TOY.training.make_inputs(
                [latents],
                torch.empty(1, device=DEVICE),
                [{"text": torch.empty(4, 8, device=DEVICE)}],
                1.0,
            )
            gc.collect()
            ledger.restart_peak()
            with Watched(swap) as watch:
                model(inputs, engine=BlockEngine(policy="full", hooks=(swap,)))[
                    0
                ].square().mean().backward()
            peaks.append(ledger.at_peak[DEVICE]["weights"])
            streamed_bytes = swap.num_bytes
            ledger.poll()
            assert not watch.there()
            assert watch.most == (2 if streamed else 0)
    assert peaks[0] - peaks[1] == streamed_bytes * 4 / 6


# A run


class Verified(World):
    """A folder with a run of two steps in it, and what its adapter's verification saw."""

    flags = (
        *(
            "--held_out.clips",
            "1",
            "--ema.decay",
            "0.9",
            "--train.accumulation",
            "2",
            "--adapter.use_dora",
            "true",
        ),
        *("--export.merged", "true", "--export.forms", '["diffusers"]'),
    )

    def __init__(self, folder):
        super().__init__(folder)
        self.seen = []
        self.spec = altered(self.spec, verify=self.verify)
        assert self.train("plain", 2, *self.flags) == 0

    def verify(self, file, components, model, run):
        """Reads all weights at once, and runs the model."""
        base = base_in_form(model, TOY.architecture.names, "diffusers")
        (item,) = toy_items(1)
        inputs = TOY.training.make_inputs([item["latents"]], torch.tensor([0.5]), [item], 1.0)
        with torch.no_grad():
            self.seen.append(
                (
                    sum(float(t.double().sum()) for t in base.values()),
                    float(run(model, inputs)[0].sum()),
                )
            )
        return "seen"

    def exports(self, name):
        files = sorted((self.folder / name / "exports").rglob("*.safetensors"))
        return {path.name.removeprefix(name): load_file(path) for path in files}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Verified(folder)


def same_results(world, name):
    plain, other = world.exports("plain"), world.exports(name)
    assert plain.keys() == other.keys() and len(plain) >= 2, "adapters and the merged transformer"
    assert all(equal(plain[file], other[file]) for file in plain)
    pictures = [sorted((world.folder / run / "samples").glob("*.png")) for run in ("plain", name)]
    assert [a.read_bytes() for a in pictures[0]] == [b.read_bytes() for b in pictures[1]] != []


def test_a_streamed_run_equals_another_bitwise(world, capsys):
    assert (
        world.train(
            "swapped",
            2,
            *world.flags,
            "--train.swap_blocks",
            "[2]",
            "--train.checkpointing",
            "full",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "2 blocks are streamed: 0.00 GiB of weights stay in host memory" in said
        and "validation loss" in said
    )
    same_results(world, "swapped")
    assert len(world.seen) == 2 and world.seen[0] == world.seen[1]


@pytest.mark.slow
def test_a_run_goes_on_under_another_swap_and_on_two_devices(world, capsys):
    assert world.train("changed", 1, *world.flags, "--train.swap_blocks", "[1]") == 0
    capsys.readouterr()
    division = ("--train.devices", '["cpu", "cpu:1"]', "--train.swap_blocks", "[1]")
    with PretendDevices():
        assert (
            world.train("changed", 2, *world.flags, *division, "--train.checkpointing", "attn_only")
            == 0
        )
    said = capsys.readouterr().out
    assert "2 blocks are streamed" in said and "not verified" in said
    assert equal(
        world.exports("plain")["_diffusers.safetensors"],
        world.exports("changed")["_diffusers.safetensors"],
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--train.swap_blocks", "[3]"), "cpu runs 2 blocks"),
        (("--train.swap_blocks", "[1]", "--adapter.method", "full"), "adapter.method = full"),
    ],
)
def test_a_swap_that_cannot_be_is_one_line(world, capsys, flags, says):
    assert world.train("refused", 1, *flags) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


# Page-locked memory


def test_every_device_is_waited_for_before_its_memory_is_unlocked(monkeypatch):
    done = []
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=done.append)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    unlock({10: one, 20: two, 30: one})
    assert set(done[:2]) == {one, two} and done[2:] == [10, 20, 30]


def test_nothing_is_locked_where_there_is_nothing(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 1)
    )
    locked = {}
    assert page_lock(torch.empty(0), torch.device("cuda", 0), locked) and not locked


# On a GPU


def test_memory_that_cannot_be_locked_leaves_no_error_behind(gpu):
    locked, tensor = {}, torch.zeros(1 << 20)
    assert page_lock(tensor, gpu.device, locked)
    assert not page_lock(tensor, gpu.device, {}), "twice is once too often"
    assert int(torch.ones(3, device=gpu.device).sum()) == 3
    unlock(locked)


@pytest.mark.parametrize("policy", daily(POLICIES, "attn_only"))
def test_a_gpu_streams_without_changing_a_number(policy, gpu):
    """Large enough that a copy takes longer than what launches it: one that is not waited for
    shows."""
    compute_fp32_in_fp32()
    outcomes, peaks, depth = [], [], gpu.size(6, 4)
    for streamed in ((), range(depth)):
        arch = ToyArch(depth=depth, dim=gpu.size(2048, 64), heads=gpu.size(16, 2))
        model = make_model(TOY, arch, adapter=replace(LORA, dropout=0.0))
        swap = place_model(model, [gpu.device] * depth, streamed)
        assert swap.locked
        gpu.runtime.synchronize(gpu.device)
        gpu.runtime.reset_peak_memory_stats(gpu.device)
        before = gpu.runtime.memory_allocated(gpu.device)
        engine = BlockEngine(policy=policy, hooks=(swap,) if streamed else ())
        with sdpa_kernel(SDPBackend.MATH):  # the others sum in any order
            outcomes += [
                [train_shortly(TOY, model, toy_items(2), engine) for _ in range(gpu.size(3, 1))]
            ]
        peaks.append(gpu.runtime.max_memory_allocated(gpu.device) - before)
    assert [numbers for numbers, _ in outcomes[0]] == [numbers for numbers, _ in outcomes[1]]
    assert equal(outcomes[0][-1][1], outcomes[1][-1][1])
    block_bytes = swap.num_bytes / depth
    assert peaks[1] - peaks[0] <= 2.1 * block_bytes, "two blocks at most"
    swap._queues[gpu.device].clear()  # what the measurement left
    assert gpu.runtime.memory_allocated(gpu.device) - before < block_bytes
