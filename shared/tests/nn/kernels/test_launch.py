"""Launches: each kernel with the arguments, on the stream and in the compiled form that Triton
itself would take; and their sizes."""

import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ditkit_core.nn.kernels import launch
from ditkit_core.nn.kernels.launch import Launcher, blocks_of, summing_programs, tile, warps

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit(do_not_specialize=["free"])
def _kernel(x, y, number, free, scalar, SIZE: tl.constexpr, ADDS: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    wide = tl.load(x + place * number, mask=place < free, other=0.0)
    tl.store(y + place, (wide * scalar + ADDS).to(y.dtype.element_ty), mask=place < free)


class OnDevice(Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    index = 0

    def get_device(self) -> int:
        return self.index


class Driver:
    """In place of a GPU's: notes what is launched, and on which device and stream."""

    def __init__(self) -> None:
        self.device, self.streams, self.launches = 0, {0: 70, 1: 71}, list[tuple[Any, ...]]()
        self.launcher_cls, self.utils = Noting, self
        self.get_current_device: Callable[[], int] = lambda: self.device
        self.get_current_stream: Callable[[int], int] = lambda index: self.streams[index]

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**17}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        # a module, a function, registers, spilled bytes, threads
        return (None, 100 + device, 16, 0, 1024)


class Noting:
    """In place of the compiled C code that launches a kernel. Which kernel that is, it says by what
    Triton compiled it for."""

    def __init__(self, source: Any, metadata: Any):
        self._kernel = str((source.signature, source.constants, source.attrs, metadata.num_warps))

    def __call__(self, *arguments: Any) -> None:
        driver = triton.runtime.driver.active
        *grid_and_stream, _, _, _ = arguments[:9]
        values = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments[9:]]
        driver.launches.append((driver.device, self._kernel, *grid_and_stream, *values))


class Call(NamedTuple):
    """One launch. Two calls that differ in one field have kernels that Triton compiles for
    different properties, or go to different places."""

    device: int = 0
    stream: int = 70
    current: int = 0
    warps: int = 4
    number: int = 32
    free: int = 7
    scalar: float = 0.5
    size: int = 16
    adds: float = 1.0
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.bfloat16)
    offsets: tuple[int, int] = (0, 0)

    def arguments(
        self,
    ) -> tuple[tuple[int, int, int], tuple[Tensor, ...], tuple[float, ...], tuple[float, ...], int]:
        tensors = []
        for memory, dtype, offset in zip(MEMORY, self.dtypes, self.offsets, strict=True):
            x = memory.view(dtype)[offset:].as_subclass(OnDevice)
            x.index = self.device
            tensors.append(x)
        return (
            (3, 1, 1),
            (*tensors,),
            (self.number, self.free, self.scalar),
            (self.size, self.adds),
            self.warps,
        )


MEMORY = tuple(torch.zeros(64, dtype=torch.float64) for _ in range(2))
CALLS = (
    Call(),
    *(Call(number=number) for number in (1, 17, 2**31, 2**40)),
    *(Call(free=free) for free in (16, 1, 2**35)),
    Call(scalar=1.0),
    Call(size=32),
    Call(adds=2.0),
    Call(warps=8),
    *(Call(offsets=offsets) for offsets in ((1, 0), (0, 1))),
    *(
        Call(dtypes=dtypes)
        for dtypes in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16))
    ),
    Call(stream=99),
    Call(device=1, current=1),
    Call(device=1, current=0),
)


@pytest.fixture
def driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    with patch.object(triton.runtime.driver, "_active", Driver()) as active:
        yield active


def launched_by(launcher: Callable[..., None], driver: Driver, call: Call) -> tuple[Any, ...]:
    driver.device, driver.streams = call.current, {0: call.stream, 1: 71}
    driver.launches.clear()
    launcher(*call.arguments())
    (launched,) = driver.launches
    return launched


class Current:
    """`device_current` of the stand-in: its driver's."""

    def __init__(self, x: OnDevice):
        self._index, self._driver = x.index, triton.runtime.driver.active

    def __enter__(self) -> None:
        self._before, self._driver.device = self._driver.device, self._index

    def __exit__(self, *_: object) -> None:
        self._driver.device = self._before


def differences(make: Callable[[], Any], driver: Driver) -> list[Call]:
    """The calls, in several orders and some again, that are launched otherwise than by Triton."""

    def by_triton(grid: Any, tensors: Any, numbers: Any, constants: Any, num_warps: int) -> None:
        with Current(tensors[0]):
            _kernel[grid](
                *tensors, *numbers, *constants, num_warps=num_warps, enable_fp_fusion=True
            )

    wanted = {call: launched_by(by_triton, driver, call) for call in CALLS}
    different = []
    for seed in range(3):
        calls, launcher = [*CALLS, *CALLS], make()
        random.Random(seed).shuffle(calls)
        different += [call for call in calls if launched_by(launcher, driver, call) != wanted[call]]
    return different


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Launcher]:
    monkeypatch.setattr(launch, "device_current", Current)
    return lambda: Launcher(_kernel, enable_fp_fusion=True)


def test_every_launch_is_what_triton_would_launch(
    driver: Driver, make: Callable[[], Launcher]
) -> None:
    assert differences(make, driver) == []


def test_triton_is_asked_once_for_each_kind_of_launch(
    driver: Driver, make: Callable[[], Launcher]
) -> None:
    launcher, asked = make(), list[Any]()

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            asked.append(grid)
            return _kernel[grid]

        arg_names = _kernel.arg_names

    launcher.kernel = Counted()
    for _ in range(3):
        for call in CALLS:
            launched_by(launcher, driver, call)
    unaligned = sum(call.offsets != (0, 0) for call in CALLS)
    elsewhere = sum(call.device != call.current for call in CALLS)
    on_other_streams = 1
    kinds = len(CALLS) - unaligned - elsewhere - on_other_streams
    assert len(asked) == kinds + 3 * (unaligned + elsewhere)


MUTANTS = {
    "device": ("(device, num_warps", "(0, num_warps"),
    "warps": ("num_warps, numbers, constants, *map", "numbers, constants, *map"),
    "numbers": ("numbers, constants, *map", "constants, *map"),
    "constants": ("constants, *map", "*map"),
    "dtypes": (", *map(_dtype, tensors))", ",)"),
    "addresses": (" and is_aligned and", " and"),
    "first address alone": ("reduce(or_, addresses) % 16", "addresses[0] % 16"),
    "current device": (" and compiled.current_device() == device", ""),
    "stream": ("current_stream(device)", "70"),
    "kept addresses": ("if is_aligned and (", "if ("),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_part_of_the_key_is_needed(
    driver: Driver, make: Callable[[], Launcher], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without it, something else is launched than Triton would: the test above finds it."""
    source = textwrap.dedent(inspect.getsource(Launcher))
    assert MUTANTS[name][0] in source
    mutated: dict[str, Any] = {}
    exec(source.replace(*MUTANTS[name]), vars(launch), mutated)  # noqa: S102
    assert differences(lambda: mutated["Launcher"](_kernel, enable_fp_fusion=True), driver)


def test_a_launcher_forgets_and_keeps_nothing_on_amd(
    driver: Driver, make: Callable[[], Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There Triton also compiles for the size of a tensor's memory."""
    launcher = make()
    monkeypatch.setattr(launch, "_MOST_KEPT", 3)
    for number in range(2, 9):
        launched_by(launcher, driver, Call(number=number))
        assert 0 < len(launcher._kept) <= 3
    monkeypatch.setattr(torch.version, "hip", "7.0")
    launcher = make()
    launched_by(launcher, driver, Call())
    assert not launcher._kept


def test_under_a_triton_that_may_start_kernels_otherwise_every_launch_is_its_own(
    driver: Driver, make: Callable[[], Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch._compiled(SimpleNamespace(run=print, function=1, packed_metadata=())) is not None
    assert launch._compiled(SimpleNamespace(run=print, function=1)) is None
    for version in ("3.3.1", "3.10.0", "nightly"):
        monkeypatch.setattr(triton, "__version__", version)
        launcher = make()
        launched_by(launcher, driver, Call())
        assert not launcher._kept, version


def test_sizes():
    assert [tile(size) for size in (1, 2, 3, 128, 5120)] == [1, 2, 4, 128, 8192]
    assert [warps(size) for size in (1, 2048, 8192, 2**20)] == [1, 2, 8, 16]
    assert [warps(size, sums=True) for size in (1, 2048, 8192, 2**20)] == [1, 4, 16, 16]
    assert [blocks_of(count, 16) for count in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert summing_programs(5, 0) == 5  # tokens of no samples
    assert (
        summing_programs(5),
        summing_programs(10**6),
        summing_programs(10**6, 4),
        summing_programs(9, 10**4),
    ) == (
        5,
        1024,
        256,
        1,
    )
