"""Samples in the cache: what a damaged entry costs a run."""

from pathlib import Path

import pytest
import torch
from toy_world import World

from ditkit_core.encoding.cache import Cache
from ditkit_core.encoding.encoded_sample import EMPTY_CAPTION_PREFIX, EncodedSample, with_caption


def test_damage_in_the_cache_does_not_reach_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    world = World(tmp_path)
    assert world.train("runs/whole", 2) == 0
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-7] ^= 4
        path.write_bytes(data)
    capsys.readouterr()
    assert world.train("runs/damaged", 2) == 0
    assert "is damaged: it is removed, and encoded again" in capsys.readouterr().err
    whole, after = world.adapter("runs/whole"), world.adapter("runs/damaged")
    assert whole.keys() == after.keys() and all(
        torch.equal(whole[name], after[name]) for name in whole
    )


def test_the_empty_caption_of_an_item_is_assembled_as_its_caption_is(tmp_path: Path) -> None:
    """A family that derives a tensor from a caption (a mask of its padding) has that of the empty
    one for target guidance."""
    cache = Cache(tmp_path)
    cache.put("media", "image", {"latents": torch.ones(2, 1, 1, 1)}, {})
    for key, rows in (("caption", 5), ("nothing", 2)):
        cache.put("text", key, {"text": torch.ones(rows, 3)}, {})
    sample = EncodedSample(
        id="image", cache=cache, media_key="image", text_keys=("caption",),
        empty_text_key="nothing",
        more_text_keys={EMPTY_CAPTION_PREFIX: "nothing"}, assemble=lambda tensors: {**tensors,
        "rows": torch.tensor(len(tensors["text"]))},
    )  # fmt: skip
    item = sample.load()
    assert set(item) == {"latents", "text", "rows", "empty_caption.text", "empty_caption.rows"}
    empty = with_caption(item, EMPTY_CAPTION_PREFIX)
    assert int(item["rows"]) == 5 and int(empty["rows"]) == len(empty["text"]) == 2
