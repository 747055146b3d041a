"""The order of micro-batches over groups: a function of seed and index, every sample once per
epoch."""

from collections import Counter

import pytest

from ditkit_core.encoding.batch_sampler import BatchSampler, BucketBatchSampler

IDS = [f"clip{i}" for i in range(17)]
GROUPS = ["abc"[i % 3] if i < 15 else "d" for i in range(17)]
SIZES = {"a": 2, "b": 3, "c": 5, "d": 4}
NUM_BATCHES = 3 + 2 + 1 + 1


def grouped(seed: int = 0, ids: list[str] = IDS, groups: list[str] = GROUPS) -> BucketBatchSampler:
    return BucketBatchSampler(ids, seed, groups, SIZES)


def test_an_epoch_has_every_sample_once_in_batches_of_one_group() -> None:
    order = grouped()
    for epoch in range(3):
        batches = [
            order.micro_batch(epoch * NUM_BATCHES + number).samples for number in range(NUM_BATCHES)
        ]
        assert sorted(i for batch in batches for i in batch) == list(range(17))
        for batch in batches:
            (group,) = {GROUPS[i] for i in batch}
            assert len(batch) <= SIZES[group]
        assert Counter(GROUPS[batch[0]] for batch in batches) == {"a": 3, "b": 2, "c": 1, "d": 1}
    assert order.mean_size == 17 / NUM_BATCHES


def test_a_batch_is_the_same_whenever_it_is_asked_for() -> None:
    forwards = [grouped().micro_batch(index) for index in range(40)]
    order = grouped()
    assert [order.micro_batch(index) for index in reversed(range(40))] == forwards[::-1]


def test_the_first_place_counts_the_samples_before() -> None:
    for order in (grouped(), BatchSampler(IDS, 0, 4)):
        seen = 0
        for index in range(30):
            first, samples = order.micro_batch(index)
            assert first == seen
            seen += len(samples)


def test_orders_differ_by_seed_and_epoch_and_so_do_the_members_of_batches() -> None:
    def epoch(seed: int, number: int) -> tuple[tuple[int, ...], ...]:
        order = grouped(seed)
        return tuple(
            tuple(order.micro_batch(number * NUM_BATCHES + i).samples) for i in range(NUM_BATCHES)
        )

    epochs = [epoch(seed, number) for seed in range(3) for number in range(3)]
    assert len(set(epochs)) == 9
    assert len({tuple("".join(GROUPS[batch[0]] for batch in each)) for each in epochs}) > 5
    assert len({frozenset(map(frozenset, each)) for each in epochs}) == 9


def test_samples_that_are_alone_in_their_group_change_places_from_epoch_to_epoch() -> None:
    order = BucketBatchSampler(IDS[:4], 0, "abcd", dict.fromkeys("abcd", 1))
    epochs = [
        tuple(order.micro_batch(4 * epoch + i).samples[0] for i in range(4)) for epoch in range(12)
    ]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs) and len(set(epochs)) > 4


def test_the_order_does_not_depend_on_how_the_samples_are_listed() -> None:
    turned = grouped(ids=IDS[::-1], groups=GROUPS[::-1])
    for index in range(20):
        named = [IDS[i] for i in grouped().micro_batch(index).samples]
        assert [IDS[::-1][i] for i in turned.micro_batch(index).samples] == named


@pytest.mark.parametrize("size", [1, 3, 17, 20])
def test_the_endless_order_has_one_size_and_every_sample_once_per_epoch(size: int) -> None:
    order = BatchSampler(IDS, 0, size)
    places = [i for index in range(17) for i in order.micro_batch(index).samples]
    assert len(places) == 17 * size and order.mean_size == size
    for epoch in range(size):
        assert sorted(places[17 * epoch : 17 * epoch + 17]) == list(range(17))
