"""Which parameters of Z-Image stay in fp32."""

import pytest

from ditkit_zimage.spec import ZIMAGE


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("embed.x_pad_token", True),
        ("embed.cap_pad_token", True),
        ("layers.0.attention_norm1.weight", True),
        ("layers.0.attention.norm_q.weight", True),
        ("layers.0.attention.to_q.weight", False),
        ("embed.x_embedder.weight", False),
    ],
)
def test_rows_of_the_residual_stream_and_norms_stay_in_fp32(name: str, stays: bool) -> None:
    """The tokens of padding are rows of that stream."""
    assert ZIMAGE.precision.keep_fp32(name) is stays
