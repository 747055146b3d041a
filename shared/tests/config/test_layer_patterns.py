"""Values by layer pattern: what fits, which entry counts, and what is refused."""

import pytest

from ditkit_core.config.layer_patterns import check_used, fits, parse_patterns, value_for
from ditkit_core.errors import UserError

LAYERS = ["layers.0.attn.q", "layers.0.attn.to_q", "layers.1.ffn.0"]


@pytest.mark.parametrize(
    ("pattern", "fitting"),
    [
        ("q", ["layers.0.attn.q"]),
        ("attn.q", ["layers.0.attn.q"]),
        ("*.attn.*", ["layers.0.attn.q", "layers.0.attn.to_q"]),
        ("layers.[1-9].*", ["layers.1.ffn.0"]),
        ("^layers.1.ffn.0", ["layers.1.ffn.0"]),
        ("^ffn.0", []),
    ],
)
def test_a_pattern_is_an_end_of_a_name_or_a_glob_or_a_whole_name(
    pattern: str, fitting: list[str]
) -> None:
    assert [layer for layer in LAYERS if fits(layer, pattern)] == fitting


def test_the_first_pattern_that_fits_counts() -> None:
    values = parse_patterns("x", ["attn.q=2", "*.attn.*=3"], "RANK", is_integer=True)
    assert [value_for(layer, values) for layer in LAYERS] == [2, 3, None]


@pytest.mark.parametrize("entry", ["q", "=4", "q=", "q=0", "q=1.5", "q=-1", "q=x"])
def test_an_entry_that_is_no_rank_is_refused(entry: str) -> None:
    with pytest.raises(
        UserError, match="is not PATTERN=RANK; write a layer pattern, = and a whole number"
    ):
        parse_patterns("adapter.rank_pattern", [entry], "RANK", is_integer=True)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1e-4"])
def test_an_entry_that_is_no_rate_is_refused(value: str) -> None:
    with pytest.raises(
        UserError, match="is not PATTERN=RATE; write a layer pattern, = and a number above 0"
    ):
        parse_patterns("optim.lr_pattern", [f"q={value}"], "RATE")


def test_patterns_that_decide_nothing_are_refused() -> None:
    with pytest.raises(
        UserError, match="'k' fits no trained layer; the names are like layers.0.attn.q"
    ):
        check_used("key", {"q": 1.0, "k": 2.0}, LAYERS)
    with pytest.raises(UserError, match="patterns before 'attn.q' fit all of its layers"):
        check_used("key", {"*.attn.*": 1.0, "attn.q": 2.0}, LAYERS)
    with pytest.raises(UserError, match="'q' is given twice"):
        parse_patterns("key", ["q=1", "q=2"], "RATE")
    check_used("key", {"attn.q": 2.0, "*.attn.*": 1.0}, LAYERS)
