"""Tiles: what is local is put together exactly, only one is at work at a time, and one tile is the
whole."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from ditkit_core.models.tiling import Tiles, in_tiles

TILES = Tiles(side=32, overlap=8)


def clip(height: int, width: int) -> torch.Tensor:
    return torch.randn(3, 2, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("height", "width"), [(32, 80), (80, 32), (56, 104), (40, 40), (64, 100)])
def test_what_looks_at_no_neighbour_is_the_same_in_tiles(height: int, width: int) -> None:
    whole = clip(height, width)

    def shrink(part: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(part, 4)

    def grow(part: torch.Tensor) -> torch.Tensor:
        return part.repeat_interleave(2, -1).repeat_interleave(2, -2)

    down = in_tiles(shrink, whole, TILES, pixels=1, scale=Fraction(1, 4))
    # weights are divided by their sum
    torch.testing.assert_close(down, shrink(whole), atol=1e-6, rtol=1e-6)
    up = in_tiles(grow, whole, TILES, pixels=2, scale=Fraction(2))
    torch.testing.assert_close(up, grow(whole), atol=1e-6, rtol=1e-6)


def test_tiles_are_of_one_size_overlap_and_cover_the_whole() -> None:
    seen, covered = [], torch.zeros(1, 1, 56, 104)

    def work(part: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(part.shape[-2:]))
        part += 1  # a view of `covered`
        return part.clone()

    in_tiles(work, covered, TILES, pixels=1, scale=Fraction(1))
    assert set(seen) == {(32, 32)} and len(seen) == 2 * 4
    assert covered.min() == 1 and (covered > 1).any()
    assert TILES.largest((5, 56, 16)) == (5, 32, 16)


def test_neighbours_are_blended_without_a_step() -> None:
    """Two tiles that are wrong by a constant each: the result goes from one to the other, and is in
    between in the overlap."""
    constants = iter([0.0, 1.0])
    whole = in_tiles(
        lambda part: torch.full_like(part, next(constants)),
        clip(32, 56),
        TILES,
        pixels=1,
        scale=Fraction(1),
    )
    row = whole[0, 0, 0]
    assert (row[:24] == 0).all() and (row[32:] == 1).all()
    assert torch.allclose(row[24:32], torch.arange(1, 9) / 9, atol=1e-6)


def test_a_single_tile_is_the_whole_bitwise() -> None:
    whole = clip(32, 24)
    assert torch.equal(in_tiles(torch.sin, whole, TILES, pixels=1, scale=Fraction(1)), whole.sin())
