"""The size of references, against the official rules worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ditkit_core.errors import UserError
from ditkit_flux2.conditioning.references import reference_size


@pytest.mark.parametrize(
    ("height", "width", "count", "expected"),
    [
        (1024, 1024, 1, (1024, 1024)),  # small enough: not enlarged
        (1000, 1500, 1, (992, 1488)),  # cut to multiples of 16
        (64, 512, 1, (64, 512)),  # exactly 8:1
        (2024, 2024, 1, (2016, 2016)),  # exactly the cap, cut
        (4048, 4048, 1, (2016, 2016)),  # one may have 2024² pixels
        (2048, 2048, 2, (1024, 1024)),  # several 1024² each
        # the official scale rounds down to 1023 pixels, which are cut
        (4048, 4048, 2, (1008, 1008)),
        (3000, 1500, 3, (1440, 720)),  # sqrt(2**20 / 4.5e6) = 0.48272: 1448 x 724
    ],
)
def test_sizes_are_those_of_the_official_code(
    height: int, width: int, count: int, expected: tuple[int, int]
) -> None:
    assert reference_size(height, width, count) == expected


@given(
    short=st.integers(64, 6000), aspect=st.floats(1, 8), count=st.integers(1, 4), wide=st.booleans()
)
def test_every_size_can_be_encoded(short: int, aspect: float, count: int, wide: bool) -> None:
    long = int(short * aspect)
    height, width = (short, long) if wide else (long, short)
    new_height, new_width = reference_size(height, width, count)
    assert new_height % 16 == new_width % 16 == 0
    assert 64 <= new_height <= height and 64 <= new_width <= width
    assert new_height * new_width <= (2024**2 if count == 1 else 1024**2)
    # nothing but the cut changes the aspect: less than 17 pixels of a side
    assert abs(new_height * width - new_width * height) < 17 * max(width, height)


@pytest.mark.parametrize(
    ("height", "width", "said"),
    [(63, 100, "100x63 pixels is too small"), (64, 513, "513x64 pixels is too long")],
)
def test_what_the_official_code_refuses_is_one_line(height: int, width: int, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        reference_size(height, width, 1)
    assert "\n" not in str(caught.value)
