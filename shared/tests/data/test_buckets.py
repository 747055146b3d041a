"""Sizes of about the same area, and which of them an image gets."""

import itertools
import math

import pytest

from ditkit_core.data.buckets import (
    Resolution,
    bucket_sizes,
    cut_share,
    describe_sizes,
    nearest_size,
    resolutions_of,
    size_of,
    sizes_within,
)
from ditkit_core.data.config import DataConfig
from ditkit_core.errors import UserError

SETS = [
    (1024, 1024, 64, 2.0),
    (1024, 1024, 16, 4.0),
    (512, 512, 64, 2.0),
    (480, 832, 16, 2.5),
    (96, 96, 16, 1.7),
]


@pytest.mark.parametrize(("height", "width", "step", "aspect"), SETS)
def test_sizes_have_about_the_area_the_step_and_the_aspect(
    height: int, width: int, step: int, aspect: float
) -> None:
    sizes = bucket_sizes(height, width, step=step, max_aspect=aspect)
    assert sizes == tuple(sorted(set(sizes))) and {(w, h) for h, w in sizes} == set(sizes)
    for h, w in sizes:
        assert h % step == w % step == 0 and max(h, w) / min(h, w) <= aspect
        # one side is as near to the area as a multiple of the step can be
        assert abs(h * w - height * width) <= step / 2 * max(h, w)


@pytest.mark.parametrize(("height", "width", "step", "aspect"), SETS)
def test_aspects_are_dense_up_to_the_largest(
    height: int, width: int, step: int, aspect: float
) -> None:
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


@pytest.mark.parametrize(("height", "width", "step", "aspect"), SETS)
def test_sizes_of_other_shapes_have_no_more_pixels(
    height: int, width: int, step: int, aspect: float
) -> None:
    sizes = sizes_within(height, width, step=step, max_aspect=aspect)
    assert {(height, width), (width, height)} <= set(sizes) == {(w, h) for h, w in sizes}
    for h, w in set(sizes) - {(height, width), (width, height)}:
        assert (
            h % step == w % step == 0
            and max(h, w) / min(h, w) <= aspect
            and h * w <= height * width
        )
        assert h * (w + step) > height * width or w * (h + step) > height * width, (
            "one side is as long as it can be"
        )


def test_a_step_larger_than_the_picture_leaves_one_size() -> None:
    assert sizes_within(64, 64, step=128, max_aspect=2.0) == ((64, 64),)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1080, 1920), (480, 832)),  # 2.5 % of it is cut away
        ((1038, 1920), (480, 832)),  # 6 %, and 448 x 832 would be nearer
        ((1920, 1080), (832, 480)),
        ((2000, 3000), (512, 768)),  # 13 % would be cut away
        ((3000, 4000), (512, 704)),
        ((1000, 1000), (576, 640)),
        ((300, 4000), (448, 832)),
    ],
)
def test_what_is_cut_little_keeps_the_configured_size(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    own = (480, 832)
    resolution = Resolution(sizes=sizes_within(*own, step=64, max_aspect=2.0), kept=own)
    assert resolution.of(*size) in (expected, expected[::-1] if size[0] == size[1] else expected)
    if expected != own and size != (300, 4000):
        assert cut_share(*size, expected) < cut_share(*size, own)
        assert cut_share(*size, expected) <= 0.1 + 1e-9


def test_the_share_that_is_cut_away() -> None:
    assert cut_share(100, 100, (50, 50)) == cut_share(3, 2, (300, 200)) == 0
    assert (
        cut_share(1920, 1080, (480, 832))
        == cut_share(1080, 1920, (832, 480))
        == pytest.approx(0.6755, abs=1e-4)
    )


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((4000, 3000), (1152, 896)),
        ((1152, 896), (1152, 896)),
        ((1151, 896), (832, 704)),
        ((1024, 1024), (1024, 1024)),
        ((1000, 1100), (768, 768)),
        ((700, 768), (512, 512)),
        ((300, 300), (512, 512)),
    ],
)
def test_a_sample_has_the_largest_resolution_that_it_fills(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    config = DataConfig(folder="x", resolutions=(512, 1024, 768), height=1024, width=1024)
    assert size_of(*size, resolutions_of(config, 16)) == expected


def test_resolutions_without_buckets_are_squares_and_with_true_are_on_the_grid() -> None:
    config = DataConfig(folder="x", resolutions=(512, 1024), buckets=False)
    assert [each.sizes for each in resolutions_of(config, 16)] == [((1024, 1024),), ((512, 512),)]
    config = DataConfig(folder="x", resolutions=(512, 1024), buckets=True)
    assert [each.sizes for each in resolutions_of(config, 16)] == [
        bucket_sizes(side, side, step=64, max_aspect=2.0) for side in (1024, 512)
    ]
