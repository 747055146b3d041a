"""Sizes of launches."""

from ditkit_core.nn.kernels.launch import summing_programs, tile, warps


def test_sizes():
    assert [tile(size) for size in (1, 2, 3, 128, 5120)] == [1, 2, 4, 128, 8192]
    assert [warps(size) for size in (1, 2048, 8192, 2**20)] == [1, 2, 8, 16]
    assert [warps(size, sums=True) for size in (1, 2048, 8192, 2**20)] == [1, 4, 16, 16]
    assert summing_programs(5, 0) == 5  # tokens of no samples
    assert (summing_programs(5), summing_programs(10**6), summing_programs(10**6, 4), summing_programs(9, 10**4)) == (
        5,
        1024,
        256,
        1,
    )
