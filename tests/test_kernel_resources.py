"""The Triton kernels of training steps, compiled for GPUs that are not here, and what
benchmarks/kernel_resources.md says of them."""

import math
import re

import pytest

from workspace import ROOT

PAGE = ROOT / "benchmarks" / "kernel_resources.md"
STACK = {("norm_rotation.backward", "3.7", 120): 8}
"""Bytes of a thread on the stack, by kernel, version of Triton and compute capability. Its
assembler then takes 64 registers, which fill 67 % of the warps; that of 3.9 takes 79 and no stack,
and fills 50 %. Those of 3.6 and 3.7 do the same for a kernel on 86 and 89, which this test leaves
out."""


@pytest.mark.slow  # two models' steps on fake tensors, and a hundred kernels for each of two GPUs
def test_kernels_fit_a_multiprocessor_and_the_page_has_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = ".".join(pytest.importorskip("triton").__version__.split(".")[:2])
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    import kernel_resources as resources
    from ditkit_core.nn.kernels.ops import IMPLEMENTATIONS

    launches = {capability: resources.launches_on(capability) for capability in (90, 120)}
    calls = {call.name for on_hopper in (False, True) for call in resources._calls(on_hopper)}
    assert calls == IMPLEMENTATIONS.keys()
    published = re.findall(
        r"^\| (\w+\.\w+ \| [^|]+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(published) == sorted(
        {launch.title for each in launches.values() for launch in each}
    )
    for capability, given in launches.items():
        limits, seen = resources.ARCHITECTURES[capability], set[str]()
        with resources.compiling_for(capability):
            for launch in given:
                code = resources.compiled(launch)
                if code.hash in seen:
                    continue
                seen.add(code.hash)
                found = resources.resources_of(code)
                # A product has its sums in registers, and one that reads ahead keeps the memory
                # busy with fewer warps.
                is_ahead = launch.title.startswith("code_products") or "STAGES 3" in launch.title
                assert limits.occupancy(found) >= (0.125 if is_ahead else 0.25), (
                    capability,
                    launch.title,
                    found,
                )
                stack = STACK.get((launch.title.partition(" |")[0], version, capability), 0)
                assert found.spilled_bytes <= stack, (capability, launch.title, found)
                assert found.widest_load == 16, (capability, launch.title)
                # In a product each thread has two neighbouring columns of several rows, which
                # Triton exchanges before a store from 3.9 on.
                is_narrow = launch.title.startswith("code_products") and version in ("3.6", "3.7")
                assert found.widest_store == (4 if is_narrow else 16), (capability, launch.title)
                assert not narrow_products(code.asm["ttir"], launch.grid), launch.title


def narrow_products(code: str, grid: tuple[int, ...]) -> list[tuple[str, str]]:
    """Products in 32 bits that reach 2**31 in a large run: not by a constant, or of a program's
    number, where that grows with the tensors."""
    fixed = {
        name: int(size)
        for name, size in re.findall(r"(%\S+) = arith\.constant (?:dense<)?(\d+)\b", code)
    }
    # Kernels that sum over rows have at most 1,024 programs; all others have more for more rows, up
    # to as many as a GPU takes.
    programs = {
        name: grid[0] if axis == "x" and grid[0] <= 1024 else 2**31 if axis == "x" else 2**16
        for name, axis in re.findall(r"(%\S+) = tt\.get_program_id (\w)", code)
    }
    tiles = {
        name: fixed.get(size, 1)
        for name, size in re.findall(r"(%\S+) = arith\.divsi %\S+, (%\S+) : i32", code)
    }
    found = []
    for factors in re.findall(r"arith\.muli (%\S+), (%\S+) : \S*?i32\b", code):
        # A grid of tiles, of a matrix that fits a GPU.
        if all(factor in tiles for factor in factors):
            if 2**40 // math.prod(tiles[factor] for factor in factors) >= 2**31:
                found.append(factors)
            continue
        constant = next((fixed[each] for each in factors if each in fixed), 2**31)
        if constant * next((programs[each] for each in factors if each in programs), 1) >= 2**31:
            found.append(factors)
    return found


def test_a_program_number_that_overflows_in_32_bits_is_found() -> None:
    code = """
        %c5120_i32 = arith.constant 5120 : i32
        %0 = tt.get_program_id x : i32
        %1 = arith.muli %0, %c5120_i32 : i32
    """
    assert narrow_products(code, (75_600,)) == [("%0", "%c5120_i32")]
    assert not narrow_products(code, (1024,))
    assert not narrow_products(
        code.replace("muli %0, %c5120_i32 : i32", "muli %0, %c5120_i32 : i64"), (75_600,)
    )


def test_a_number_of_tiles_fits_32_bits_where_the_tiles_are_large() -> None:
    code = """
        %c128_i32 = arith.constant 128 : i32
        %1 = arith.divsi %0, %c128_i32 : i32
        %3 = arith.divsi %2, %c128_i32 : i32
        %4 = arith.muli %1, %3 : i32
    """
    assert not narrow_products(code, (132,))
    assert narrow_products(code.replace("128 :", "8 :"), (132,)) == [("%1", "%3")]
    assert narrow_products(code.replace("divsi %2", "addi %2"), (132,)) == [("%1", "%3")]


def test_occupancy_is_that_of_the_scarcest_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """By registers, shared memory, programs and warps, each as NVIDIA's occupancy calculator rounds
    it."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    from kernel_resources import ARCHITECTURES, Resources

    def occupancy(capability: int, registers: int, shared: int, warps: int) -> float:
        found = Resources(
            registers=registers,
            spilled_bytes=0,
            shared_bytes=shared,
            warps=warps,
            widest_load=16,
            widest_store=16,
        )
        return ARCHITECTURES[capability].occupancy(found)

    assert occupancy(90, 170, 8192, 8) == 8 / 64  # 176 registers a thread, 11 warps, in fours 8
    assert occupancy(90, 118, 8192, 8) == 16 / 64
    assert occupancy(120, 218, 8192, 8) == 8 / 48
    assert occupancy(90, 32, 0, 1) == 32 / 64  # as many programs as there may be
    assert occupancy(86, 32, 49 * 1024, 4) == 8 / 48  # two programs with 50 KiB each
    assert occupancy(90, 32, 0, 4) == 1
