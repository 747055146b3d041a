"""Trigger words and orders of tags."""

from typing import Any

import pytest

from ditkit_core.data.captions import captions_of, tag_orders, with_trigger
from ditkit_core.data.config import DataConfig
from ditkit_core.errors import UserError


def config(**settings: Any) -> DataConfig:
    return DataConfig(folder="x", **settings)


@pytest.mark.parametrize(
    ("caption", "found"),
    [
        ("a cat", "ohwx a cat"),
        ("the ohwx cat", "the ohwx cat"),
        ("ohwxes", "ohwx ohwxes"),
        ("Ohwx", "ohwx Ohwx"),
        ("an (ohwx), here", "an (ohwx), here"),
    ],
)
def test_a_trigger_word_goes_in_front_of_captions_without_it(caption: str, found: str) -> None:
    assert with_trigger(caption, config(trigger="ohwx")) == found
    assert with_trigger(caption, config()) == caption


def test_a_trigger_may_be_of_any_characters() -> None:
    assert with_trigger("a c++ dog", config(trigger="c++")) == "a c++ dog"
    assert with_trigger("a cat", config(trigger="[v*]")) == "[v*] a cat"


TAGS = "one, two, three, four, five"


def test_tags_are_sampled_in_as_many_orders_as_asked_for() -> None:
    orders = tag_orders(TAGS, config(shuffle_tags=True, tag_variants=6))
    assert orders[0] == TAGS and len(set(orders)) == len(orders) == 6
    assert {tuple(sorted(order.split(", "))) for order in orders} == {
        tuple(sorted(TAGS.split(", ")))
    }
    assert orders == tag_orders(TAGS, config(shuffle_tags=True, tag_variants=6))
    assert tag_orders(TAGS, config(shuffle_tags=True, tag_variants=3)) == orders[:3], (
        "others stay in the cache"
    )
    assert tag_orders(TAGS, config(shuffle_tags=True, tag_variants=6, seed=1))[1:] != orders[1:]


def test_first_tags_may_be_kept_and_few_tags_have_few_orders() -> None:
    kept = tag_orders(TAGS, config(shuffle_tags=True, keep_tags=2, tag_variants=64))
    assert all(order.startswith("one, two, ") for order in kept) and len(kept) == 6
    assert tag_orders("one,two", config(shuffle_tags=True, keep_tags=5)) == ("one, two",)
    assert tag_orders(" , ,", config(shuffle_tags=True)) == (" , ,",)


def test_another_separator_and_a_trigger_among_the_tags() -> None:
    semicolons = tag_orders(
        "a, b; c; d", config(shuffle_tags=True, tag_separator=";", tag_variants=64)
    )
    assert len(semicolons) == 6 and "a, b; d; c" in semicolons
    found = captions_of(
        ("one, ohwx, two",), config(shuffle_tags=True, trigger="ohwx", tag_variants=64)
    )
    assert set(found) == {"ohwx, one, two", "ohwx, two, one"}
    assert captions_of(("one",), config(shuffle_tags=True, trigger="ohwx")) == ("ohwx, one",)


def test_several_captions_keep_their_order_and_are_reported_once() -> None:
    assert captions_of(("a", "ohwx a", "b"), config(trigger="ohwx")) == ("ohwx a", "ohwx b")
    assert captions_of(("a", "b"), config()) == ("a", "b")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"trigger": "  "}, "data.trigger is blank"),
        ({"shuffle_tags": True, "tag_separator": ""}, "data.tag_separator is blank"),
        ({"trigger": "\ud800"}, "data.trigger contains a lone surrogate"),
        ({"keep_tags": 1}, "data.keep_tags = 1 has no effect without data.shuffle_tags = true"),
        ({"tag_variants": 8}, "data.tag_variants = 8 has no effect without data.shuffle_tags"),
        ({"tag_separator": ";"}, "data.tag_separator = ; has no effect without"),
        (
            {"shuffle_tags": True, "tag_variants": 65},
            "data.tag_variants = 65 is not between 1 and 64; set 64",
        ),
        (
            {"shuffle_tags": True, "keep_tags": -1},
            "data.keep_tags = -1 is not between 0 and 1000; set 0",
        ),
    ],
)
def test_caption_settings_that_do_nothing_are_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(**settings)
