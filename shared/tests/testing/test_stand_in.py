"""Stand-ins for GPUs: what they do as CUDA does, and that levers name the right device."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ditkit_core.engine.engine import POLICIES, BlockEngine
from ditkit_core.io.runtimes import runtime_of
from ditkit_core.nn.attention import backends as attention_backends
from ditkit_core.nn.attention.backends import BACKENDS, Backend
from ditkit_core.nn.context import device_current
from ditkit_core.testing.conformance_streams import place_model
from ditkit_core.testing.pretend_devices import on_host
from ditkit_core.testing.stand_in import StandIn
from ditkit_core.testing.toy import TOY, ToyArch, toy_items
from ditkit_core.testing.world import make_model, outcome

HOST, ONE, TWO = (torch.device(name) for name in ("cpu", "cpu:1", "cpu:2"))
ARCH = ToyArch(depth=4, dim=16, dropout=0.2)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with StandIn() as found:
        yield found


def page_locked(stand_in: StandIn, num: int) -> Tensor:
    tensor = torch.zeros(num)
    assert stand_in.runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1) == 0
    return tensor


def test_the_host_has_no_runtime_and_a_stand_in_only_inside(stand_in: StandIn) -> None:
    assert runtime_of(HOST) is None and runtime_of(ONE) is stand_in.runtime
    with pytest.raises(AttributeError):  # nothing that it does not model
        _ = stand_in.runtime.set_stream


def test_a_page_is_locked_once(stand_in: StandIn) -> None:
    tensor = page_locked(stand_in, 4096)
    assert stand_in.runtime.cudaHostRegister(tensor.data_ptr() + 8, 8, 1) != 0
    assert stand_in.runtime.is_locked(tensor[5:]) and not stand_in.runtime.is_locked(torch.zeros(3))
    stand_in.runtime.cudaHostUnregister(tensor.data_ptr())
    assert not stand_in.runtime.is_locked(tensor)


def test_a_device_samples_with_a_generator_of_its_own(stand_in: StandIn) -> None:
    made = torch.randn(3, generator=torch.Generator(ONE).manual_seed(1), device=ONE)
    assert torch.equal(on_host(made), torch.randn(3, generator=torch.Generator().manual_seed(1)))
    for other in (HOST, TWO):
        with pytest.raises(AssertionError, match="a generator of cpu"):
            torch.randn(3, generator=torch.Generator(other).manual_seed(2), device=ONE)


def test_pinned_memory_is_freed_after_its_copies_but_may_be_written_too_early(
    stand_in: StandIn,
) -> None:
    pinned = torch.ones(8192).pin_memory()
    there = pinned.to(ONE, non_blocking=True)
    del pinned
    assert stand_in.runtime.log.races == [] and float(there.sum()) == 8192
    pinned = torch.ones(8192).pin_memory()
    there = pinned.to(ONE, non_blocking=True)
    pinned.zero_()
    assert len(stand_in.runtime.log.races) == 1


@pytest.mark.parametrize(
    ("locked", "non_blocking", "races"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_the_host_waits_for_copies_as_cuda_has_it(
    stand_in: StandIn, locked: bool, non_blocking: bool, races: int
) -> None:
    there, here = (
        torch.ones(8192, device=ONE),
        page_locked(stand_in, 8192) if locked else torch.zeros(8192),
    )
    here.copy_(there, non_blocking=non_blocking)
    assert float(here.sum()) == 8192  # what ran is true, whatever a GPU could have done
    assert len(stand_in.runtime.log.races) == races


def test_a_page_locked_tensor_is_read_when_the_copy_runs(stand_in: StandIn) -> None:
    here, other = page_locked(stand_in, 8192), torch.zeros(8192)
    one, two = here.to(ONE, non_blocking=True), other.to(ONE, non_blocking=True)
    other.add_(1)
    assert stand_in.runtime.log.races == [] and one.device == two.device == ONE
    here.add_(1)
    assert stand_in.runtime.log.races == [
        "add_ on the host does not wait for the copy to cpu:1 on cpu:1"
    ]


def test_a_number_that_is_read_and_a_copy_between_devices_wait(stand_in: StandIn) -> None:
    runtime = stand_in.runtime
    side = runtime.Stream(TWO)
    there = torch.ones(4, device=ONE).to(TWO, non_blocking=True)
    with runtime.stream(side):
        there * 2
    assert runtime.log.races == [
        "mul on cpu:2, side stream 1 does not wait for the copy to cpu:2 on cpu:1"
    ]
    assert float(there.sum()) == 4
    with runtime.stream(side):
        there * 2
    assert len(runtime.log.races) == 1


def test_a_number_on_the_host_is_read_when_work_with_it_is_launched(stand_in: StandIn) -> None:
    """The host has to wait for its copy, although only the device computes with it."""
    there = torch.ones(4, device=ONE)
    number = there.sum().to(HOST, non_blocking=True)
    there * number
    assert stand_in.runtime.log.races == [
        "mul on the host does not wait for the copy to cpu on cpu:1"
    ]


def test_memory_is_counted_and_returned_to_its_stream(stand_in: StandIn) -> None:
    runtime = stand_in.runtime
    buffer = torch.empty(300, dtype=torch.uint8, device=ONE)
    buffer.untyped_storage().resize_(0)
    assert runtime.memory_allocated(ONE) == 0 and runtime.max_memory_allocated(ONE) == 512
    buffer.untyped_storage().resize_(600)
    assert runtime.memory_allocated(ONE) == 1024
    del buffer
    assert runtime.memory_allocated(ONE) == 0


def test_each_device_has_a_generator(stand_in: StandIn) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two = torch.randn(4, device=ONE), torch.randn(4, device=TWO)
    assert torch.equal(on_host(one), on_host(two)) and torch.equal(torch.get_rng_state(), before)
    again = torch.randn(4, device=ONE)
    assert not torch.equal(on_host(one), on_host(again))
    torch.manual_seed(3)
    assert torch.equal(on_host(torch.randn(4, device=TWO)), on_host(one))


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_a_recompute_restores_the_generator_of_its_own_device(
    stand_in: StandIn, policy: str
) -> None:
    """Dropout on two devices, each with random numbers of its own."""
    found = []
    for chosen in ("none", policy):
        model = make_model(TOY, ARCH)
        place_model(model, [ONE, ONE, TWO, TWO])
        found.append(outcome(TOY, model, toy_items(2), BlockEngine(policy=chosen)))
        state = [runtime_of(device).get_rng_state(device) for device in (ONE, TWO)]
        found[-1] = found[-1], state
    assert found[0][0].differences(found[1][0]) == []
    assert all(map(torch.equal, found[0][1], found[1][1])), (
        "a recompute leaves the generators as they were"
    )


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_librarys_kernel_is_launched_with_its_own_device_current(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, policy: str, guarded: bool
) -> None:
    """In the forward, which is launched for all devices in one thread, and in a recompute."""
    launched: list[tuple[int, int]] = []

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, dropout: float, causal: bool
    ) -> Tensor:
        launched.append((q.device.index, stand_in.runtime.current_device()))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    entry = Backend(
        kernel=partial(attention_backends._on_its_device, kernel),
        takes_mask=True,
        takes_dropout=False,
        half_only=False,
        module="math",
    )
    monkeypatch.setitem(BACKENDS, "library", entry)
    if not guarded:
        monkeypatch.setattr(attention_backends, "device_current", lambda x: nullcontext())
    model = make_model(TOY, ToyArch(depth=4, dim=16))
    place_model(model, [ONE, ONE, TWO, TWO])
    outcome(TOY, model, toy_items(2), BlockEngine(policy=policy, backend="library"))
    assert {device for device, _ in launched} == {1, 2}
    assert all(device == current for device, current in launched) == guarded
    with device_current(torch.ones(1, device=TWO)):
        assert stand_in.runtime.current_device() == 2
