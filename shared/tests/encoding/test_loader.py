"""The order of training data: a function of seed and index, with every sample once per epoch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ditkit_core.data.dataset import Sample
from ditkit_core.encoding.batch_sampler import Epochs
from ditkit_core.encoding.cache import Cache, key
from ditkit_core.encoding.encoded_sample import EncodedSample
from ditkit_core.encoding.loader import BatchSize, TrainDataLoader, files_of, split_held_out
from ditkit_core.errors import UserError

IDS = [f"clip{i}" for i in range(7)]
WIDE = {"clip1", "clip4", "clip6"}


@pytest.fixture
def samples(tmp_path: Path) -> list[EncodedSample]:
    cache = Cache(tmp_path)
    cache.put("text", key(""), {"text": torch.zeros(1, 1)}, {})
    for i, id in enumerate(IDS):
        cache.put("media", key(id), {"latents": torch.full((1, 1, 1, 1), float(i))}, {})
        cache.put("text", key(id), {"text": torch.ones(1, 1)}, {})
    return [
        EncodedSample(
            id=id, cache=cache, media_key=key(id), text_keys=(key(id),), empty_text_key=key("")
        )
        for id in IDS
    ]


@pytest.fixture
def shaped(tmp_path: Path) -> list[EncodedSample]:
    """Three samples wider than the rest, two with a reference, all with three captions."""
    cache = Cache(tmp_path)
    cache.put("text", key(""), {"text": torch.zeros(2, 1)}, {})
    cache.put("media", key("reference"), {"latents": torch.full((1, 1, 1, 3), 9.0)}, {})
    for i, id in enumerate(IDS):
        cache.put(
            "media",
            key(id),
            {"latents": torch.full((1, 1, 1, 2 if id in WIDE else 1), float(i))},
            {},
        )
        for number in range(3):
            cache.put(
                "text",
                key(id, str(number)),
                {"text": torch.full((1 + number, 1), 1.0 + number)},
                {},
            )
    return [
        EncodedSample(
            id=id, cache=cache, media_key=key(id), text_keys=tuple(key(id,
            str(number)) for number in range(3)),
            empty_text_key=key(""), reference_keys=(key("reference"),) if id in ("clip2",
            "clip6") else (),
        )
        for id in IDS
    ]  # fmt: skip


def drawn(
    samples: list[EncodedSample], batches: int, *, batch_size: int = 2, **settings: float
) -> list[str]:
    size = BatchSize(samples=batch_size)
    data = TrainDataLoader(samples, **{"seed": 0, "batch_size": size, **settings})  # type: ignore[arg-type]
    return [id for index in range(batches) for id in data.micro_batch(index).ids]


def test_every_sample_is_used_once_per_epoch_in_batches_of_one_size(
    samples: list[EncodedSample],
) -> None:
    for batch_size in (1, 2, 3, 7, 10):
        ids = drawn(samples, 7, batch_size=batch_size)
        assert len(ids) == 7 * batch_size
        for epoch in range(batch_size):
            assert sorted(ids[7 * epoch : 7 * epoch + 7]) == IDS


def test_a_micro_batch_is_the_same_whenever_it_is_read(samples: list[EncodedSample]) -> None:
    data = TrainDataLoader(samples, seed=1, batch_size=BatchSize(samples=2), caption_dropout=0.5)
    forwards = [data.micro_batch(index) for index in range(20)]
    again = TrainDataLoader(samples, seed=1, batch_size=BatchSize(samples=2), caption_dropout=0.5)
    backwards = [again.micro_batch(index) for index in reversed(range(20))][::-1]
    for one, other in zip(forwards, backwards, strict=True):
        assert one.ids == other.ids
        for a, b in zip(one.items, other.items, strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_items_belong_to_their_ids(samples: list[EncodedSample]) -> None:
    batch = TrainDataLoader(samples, seed=3, batch_size=BatchSize(samples=7)).micro_batch(0)
    assert [IDS[int(item["latents"])] for item in batch.items] == batch.ids


def test_orders_differ_by_seed_and_epoch(samples: list[EncodedSample]) -> None:
    orders = [tuple(Epochs(IDS, seed).order(epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9
    assert drawn(samples, 7) != drawn(samples, 7, seed=1)
    expected = [IDS[i] for epoch in range(3) for i in Epochs(IDS, 4).order(epoch)]
    assert drawn(samples, 3, seed=4, batch_size=7) == expected


def test_an_order_depends_on_ids_alone() -> None:
    order = [IDS[i] for i in Epochs(IDS, 5).order(2)]
    turned = IDS[::-1]
    assert [turned[i] for i in Epochs(turned, 5).order(2)] == order
    more = ["new", *IDS]
    assert [more[i] for i in Epochs(more, 5).order(2) if more[i] != "new"] == order
    # on every platform and version
    assert order == ["clip2", "clip4", "clip1", "clip6", "clip0", "clip3", "clip5"]


def test_first_places_are_evenly_spread() -> None:
    counts = torch.bincount(
        torch.tensor([Epochs(IDS, 0).order(epoch)[0] for epoch in range(2100)]), minlength=7
    )
    assert counts.min() > 240 and counts.max() < 360  # 300 each, 3.7 standard deviations


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_captions_are_dropped_at_the_rate_asked_for(
    samples: list[EncodedSample], rate: float
) -> None:
    data = TrainDataLoader(samples, seed=0, batch_size=BatchSize(samples=2), caption_dropout=rate)
    count = 150 if 0 < rate < 1 else 20
    dropped = [
        float(item["text"]) == 0 for index in range(count) for item in data.micro_batch(index).items
    ]
    assert sum(dropped) / len(dropped) == pytest.approx(rate, abs=0.1 if 0 < rate < 1 else 0)
    assert len(dropped) == 2 * count


def test_dropout_does_not_change_the_order(samples: list[EncodedSample]) -> None:
    assert drawn(samples, 9, caption_dropout=0.5) == drawn(samples, 9)


def test_held_out_samples_are_few_stable_and_apart() -> None:
    ids = [f"clip{i}" for i in range(50)]
    train, held_out = split_held_out(ids, 5)
    assert len(held_out) == 5 and sorted(train + held_out) == sorted(ids)
    assert split_held_out(ids[::-1], 5)[1] == held_out[::-1]
    for i in range(20):
        moved = set(split_held_out([*ids, f"new{i}"], 5)[1]) - set(held_out)
        assert moved <= {f"new{i}"}
    assert split_held_out(ids, 0) == (ids, [])


def test_windows_of_a_file_are_held_out_together() -> None:
    alone = [f"clip{i}" for i in range(10)]
    windows = [f"clip{i}#{j}" for i in range(10) for j in range(3)]
    file_of = {window: window.split("#")[0] for window in windows}
    for count in range(1, 20):
        train, held_out = split_held_out(windows, count, file_of)
        assert sorted(train + held_out) == sorted(windows) and count <= len(held_out) < count + 3
        files = {file_of[id] for id in held_out}
        assert not files & {file_of[id] for id in train}
        assert files == set(split_held_out(alone, len(files))[1]), (
            "by the name of the file, however many windows it has"
        )
    with pytest.raises(
        UserError,
        match="holding out 2 of 3 clips of 1 files, whose windows stay together, leaves none",
    ):
        split_held_out(windows[:3], 2, file_of)


def test_the_file_of_a_window_is_known_by_what_it_reads() -> None:
    def clip(id: str, media: str) -> Sample:
        return Sample(id=id, media=Path(media), captions=("x",), frames=1, height=16, width=16)

    samples = [
        clip("a/x#0", "x.mp4"),
        clip("a/x#1", "x.mp4"),
        clip("y#0", "y#0.mp4"),
        clip("y#1", "y#1.mp4"),
        clip("z", "z.mp4"),
    ]
    assert files_of(samples) == {"a/x#0": "a/x", "a/x#1": "a/x"}


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(
        UserError, match="holding out 7 of 7 clips leaves none to train on; lower held_out.clips"
    ):
        split_held_out(IDS, 7)


def test_a_micro_batch_has_one_shape_and_every_sample_comes_once_per_epoch(
    shaped: list[EncodedSample],
) -> None:
    data = TrainDataLoader(shaped, seed=2, batch_size=BatchSize(samples=2))
    for epoch in range(4):
        batches = [data.micro_batch(5 * epoch + number) for number in range(5)]
        assert sorted(id for batch in batches for id in batch.ids) == IDS
        for batch in batches:
            shapes = [
                {name: t.shape for name, t in item.items() if name != "text"}
                for item in batch.items
            ]
            assert all(shape == shapes[0] for shape in shapes)
            assert [float(item["latents"].flatten()[0]) for item in batch.items] == [
                IDS.index(id) for id in batch.ids
            ]
    assert set(data.micro_batch(0).items[0]) >= {"latents", "text"}


def test_the_order_reads_headers_alone(
    shaped: list[EncodedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Cache, "get", reading)
    TrainDataLoader(
        shaped,
        seed=0,
        batch_size=BatchSize(tokens=6, num_tokens=lambda item: item["latents"].shape[-1]),
    )


def test_a_reference_comes_with_its_sample(shaped: list[EncodedSample]) -> None:
    data = TrainDataLoader(shaped, seed=0, batch_size=BatchSize(samples=7))
    items = {
        id: item
        for index in range(4)
        for b in [data.micro_batch(index)]
        for id, item in zip(b.ids, b.items, strict=True)
    }
    assert sorted(id for id, item in items.items() if "reference.0" in item) == ["clip2", "clip6"]
    assert items["clip2"]["reference.0"].tolist() == [[[[9, 9, 9]]]]


def test_small_micro_batches_count_for_the_mean_size(shaped: list[EncodedSample]) -> None:
    """So every sample has the same weight in an epoch: its part of a step's loss is 1 / what the
    step counts for."""
    grouped = TrainDataLoader(shaped, seed=2, batch_size=BatchSize(samples=2))
    assert {grouped.micro_batch(index).counted for index in range(10)} == {7 / 5}
    alike = TrainDataLoader(
        [s for s in shaped if s.id in ("clip0", "clip3", "clip5")],
        seed=2,
        batch_size=BatchSize(samples=2),
    )
    assert alike.micro_batch(0).counted is None and len(alike.micro_batch(1).ids) == 2


def test_a_budget_of_tokens_gives_each_shape_its_size(shaped: list[EncodedSample]) -> None:
    def tokens(item: dict[str, torch.Tensor]) -> int:
        return sum(tensor.shape[-1] for name, tensor in item.items() if name != "text")

    data = TrainDataLoader(shaped, seed=0, batch_size=BatchSize(tokens=4, num_tokens=tokens))
    batches = [data.micro_batch(index) for index in range(4)]
    assert sorted(id for batch in batches for id in batch.ids) == IDS
    found = {frozenset(tokens(item) for item in batch.items): len(batch.ids) for batch in batches}
    # narrow ones three at once, wide ones two; with a reference they have 4 and 5 tokens, and go
    # alone
    assert found == {frozenset({1}): 3, frozenset({2}): 2, frozenset({4}): 1, frozenset({5}): 1}


def test_captions_take_turns_as_a_function_of_seed_index_and_id(
    shaped: list[EncodedSample],
) -> None:
    def chosen(seed: int, count: int = 30) -> list[tuple[str, float]]:
        data = TrainDataLoader(shaped, seed=seed, batch_size=BatchSize(samples=2))
        batches = [data.micro_batch(index) for index in range(count)]
        return [
            (id, float(item["text"][0]))
            for b in batches
            for id, item in zip(b.ids, b.items, strict=True)
        ]

    first, again = chosen(0, 200), chosen(0)
    assert first[: len(again)] == again != chosen(1)
    counts = torch.tensor(
        [sum(caption == value for _, caption in first) for value in (1.0, 2.0, 3.0)]
    )
    assert int(counts.sum()) == 280
    assert counts.min() > 65 and counts.max() < 122  # 93 each, 3.6 standard deviations
    assert len({caption for id, caption in first if id == "clip3"}) == 3


def test_dropout_empties_any_of_several_captions(shaped: list[EncodedSample]) -> None:
    data = TrainDataLoader(shaped, seed=0, batch_size=BatchSize(samples=2), caption_dropout=1.0)
    assert all(
        item["text"].tolist() == [[0], [0]]
        for index in range(10)
        for item in data.micro_batch(index).items
    )
    assert shaped[0].load()["text"].tolist() == [[1]]  # what is held out is measured with the first


def test_half_of_the_uses_are_mirrored_and_a_function_of_seed_and_index(
    samples: list[EncodedSample],
) -> None:
    cache = samples[0].cache
    cache.put("media", key("other way"), {"latents": torch.full((1, 1, 1, 1), 100.0)}, {})
    both = [replace(each, mirrored=replace(each, media_key=key("other way"))) for each in samples]

    def uses(given: list[EncodedSample], seed: int = 0, first: int = 0) -> list[float]:
        data = TrainDataLoader(given, seed=seed, batch_size=BatchSize(samples=2))
        return [
            float(item["latents"]) for i in range(first, 100) for item in data.micro_batch(i).items
        ]

    mirrored = uses(both)
    assert 70 < sum(value == 100 for value in mirrored) < 130
    plain = uses(samples)
    assert all(value in (100, there) for value, there in zip(mirrored, plain, strict=True)), (
        "the order stays"
    )
    for sample in set(plain):
        of_sample = {way for way, there in zip(mirrored, plain, strict=True) if there == sample}
        assert of_sample == {100, sample}, "each is used in both ways"
    assert uses(both, first=50) == mirrored[100:] and uses(both, seed=1, first=80) != mirrored[160:]
