"""Sizes of about the same area, and which of them an image gets."""

import itertools
import math

import pytest

from ditkit_core.data.buckets import bucket_sizes, describe_sizes, nearest_size
from ditkit_core.errors import UserError

SETS = [(1024, 1024, 64, 2.0), (1024, 1024, 16, 4.0), (512, 512, 64, 2.0), (480, 832, 16, 2.5), (96, 96, 16, 1.7)]


@pytest.mark.parametrize(("height", "width", "step", "aspect"), SETS)
def test_sizes_have_about_the_area_the_step_and_the_aspect(height: int, width: int, step: int, aspect: float) -> None:
    sizes = bucket_sizes(height, width, step=step, max_aspect=aspect)
    assert sizes == tuple(sorted(set(sizes))) and {(w, h) for h, w in sizes} == set(sizes)
    for h, w in sizes:
        assert h % step == w % step == 0 and max(h, w) / min(h, w) <= aspect
        # one side is as near to the area as a multiple of the step can be
        assert abs(h * w - height * width) <= step / 2 * max(h, w)


@pytest.mark.parametrize(("height", "width", "step", "aspect"), SETS)
def test_aspects_are_dense_up_to_the_largest(height: int, width: int, step: int, aspect: float) -> None:
    ratios = sorted({w / h for h, w in bucket_sizes(height, width, step=step, max_aspect=aspect)})
    shortest = math.sqrt(height * width / aspect)
    assert all(b / a < 1 + 2 * step / shortest for a, b in itertools.pairwise(ratios))
    assert ratios[-1] * (1 + 2 * step / shortest) > aspect


def test_the_known_sizes_of_a_megapixel_are_among_them() -> None:
    sizes = bucket_sizes(1024, 1024, step=64, max_aspect=2.0)
    assert {(1024, 1024), (896, 1152), (832, 1216), (768, 1344)} <= set(sizes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((3000, 3000), (96, 96)),
        ((100, 149), (80, 112)),
        ((149, 100), (112, 80)),
        ((10, 9), (96, 96)),
        ((1, 40), (80, 128)),
        ((40, 1), (128, 80)),
    ],
)
def test_an_image_gets_the_nearest_aspect_and_a_longer_one_the_longest(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert nearest_size(*size, bucket_sizes(96, 96, step=16, max_aspect=1.7)) == expected


def test_of_equally_near_sizes_the_larger_is_taken() -> None:
    assert nearest_size(100, 100, [(64, 64), (96, 96), (80, 80)]) == (96, 96)


def test_a_step_without_any_size_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="lower data.bucket_step") as caught:
        bucket_sizes(96, 96, step=256, max_aspect=2.0)
    assert "\n" not in str(caught.value)


def test_counts_are_reported_by_size() -> None:
    assert describe_sizes([(96, 96), (80, 112), (96, 96)]) == "80 x 112: 1, 96 x 96: 2"
