"""Several folders in one dataset, and how often an epoch has the samples of each."""

import re
import shutil
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from data_specs import CLIPS
from media_files import picture

from ditkit_core.data.config import DataConfig
from ditkit_core.data.dataset import Dataset, scan
from ditkit_core.data.discovery import names_of
from ditkit_core.encoding.batch_sampler import BatchSampler, BucketBatchSampler, Epochs
from ditkit_core.encoding.prior_preservation import prior_data_config
from ditkit_core.errors import UserError


def look(*folders: Path, **settings: Any) -> Dataset:
    data = DataConfig(
        **{"folders": tuple(map(str, folders)), "frames": 1, "height": 32, "width": 32, **settings}
    )
    return scan(data, CLIPS)


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        picture(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(name)
    return folder


def test_ids_begin_with_as_much_of_the_folder_as_tells_it_apart(tmp_path: Path) -> None:
    one, two = filled(tmp_path / "cats", "a", "b"), filled(tmp_path / "dogs", "a")
    three = filled(tmp_path / "other" / "dogs", "a")
    assert [sample.id for sample in look(one).samples] == ["a", "b"]
    assert [sample.id for sample in look(one, two).samples] == ["cats/a", "cats/b", "dogs/a"]
    found = {sample.id for sample in look(one, three, two).samples}
    assert found == {"cats/a", "cats/b", "other/dogs/a", f"{tmp_path.name}/dogs/a"}
    assert names_of(["x/a", "y/a", "b"]) == ["x/a/", "y/a/", "b/"]


def test_each_folder_has_its_repeats_and_its_metadata(tmp_path: Path) -> None:
    one, two = filled(tmp_path / "cats", "a"), filled(tmp_path / "dogs", "a", "b")
    (two / "metadata.csv").write_text("image,text\na.png,listed\n")
    found = {
        sample.id: (sample.repeats, sample.captions)
        for sample in look(one, two, repeats=(1.5, 3.0)).samples
    }
    assert found == {"cats/a": (1.5, ("a",)), "dogs/a": (3, ("listed",))}
    assert look(folder=str(one), repeats=(0.5,)).samples[0].repeats == 0.5
    assert look(one, two).samples[0].repeats == 1.0


def test_a_clip_is_not_read_from_a_folder_and_from_one_inside_it(tmp_path: Path) -> None:
    inner = filled(tmp_path / "all" / "cats", "a")
    with pytest.raises(
        UserError,
        match="a.png is read from .*all and again from .*cats; name folders that do not overlap",
    ):
        look(tmp_path / "all", inner)
    (tmp_path / "all" / "metadata.csv").write_text("image,text\nb.png,listed\n")
    shutil.copy(inner / "a.png", tmp_path / "all" / "b.png")
    assert [sample.id for sample in look(tmp_path / "all", inner).samples] == ["all/b", "cats/a"]


def test_what_is_left_out_is_named_with_its_folder(tmp_path: Path) -> None:
    one, two = filled(tmp_path / "cats", "a"), filled(tmp_path / "dogs", "a", "b")
    (two / "b.txt").unlink()
    with pytest.raises(UserError, match="dogs/b.png has no caption"):
        look(one, two)
    ((name, reason),) = look(one, two, on_bad="skip").excluded
    assert name == "dogs/b.png" and "has no caption" in reason
    (two / "a.txt").unlink()
    with pytest.raises(UserError, match="data.folders .*dogs has no usable sample"):
        look(one, two, on_bad="skip")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"folder": "x", "folders": ("y",)}, "data.folder and data.folders are both set"),
        ({"folders": ("x", "x")}, "data.folders has a folder twice"),
        ({"folders": ("x", "")}, "data.folders has an empty name"),
        (
            {"folders": ("x", "y"), "repeats": (1.0,)},
            "data.repeats has 1 numbers for 2 folders; set one for each",
        ),
        ({"folder": "x", "repeats": (1.0, 2.0)}, "data.repeats has 2 numbers for 1 folders"),
        (
            {"folder": "x", "repeats": (0.0,)},
            "data.repeats has 0, which is not above 0 and at most 1000",
        ),
        ({"folders": ("x", "y"), "references": "z"}, "data.references works with one folder only"),
        ({"folders": ("x", "y"), "controls": ("a=z",)}, "data.controls works with one folder only"),
    ],
)
def test_folders_that_contradict_themselves_are_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        DataConfig(**settings)


def test_folders_have_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.folders .*gone does not exist or is not a folder"):
        look(filled(tmp_path / "a", "x"), tmp_path / "gone")


def test_a_missing_relative_folder_is_named_with_the_place_that_it_starts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError,
        match=f"gone does not exist or is not a folder in {re.escape(str(tmp_path))}; correct",
    ):
        look(Path("gone"))


def test_class_images_have_neither_files_of_the_instance_nor_the_trigger_word() -> None:
    """What names files or folders of the instance is not looked for among class images."""
    paths = {
        field.name: ("a.png=0,0",) if str(field.type).startswith("tuple") else "a"
        for field in fields(DataConfig)
        if field.metadata["holds"] == "path" and field.name != "folder"
    }
    assert {"folders", "metadata", "exclude", "crops", "references", "masks"} <= paths.keys()
    instance = DataConfig(
        **{
            **paths,
            "folders": ("x", "y"),
            "repeats": (1.0, 2.0),
            "trigger": "ohwx",
            "references": "",
            "controls": (),
            "masks": "",
        }
    )
    for single in (
        {},
        {"folders": ("x",), "repeats": (), "references": "a", "masks": "a", "controls": ("v=a",)},
    ):
        data = prior_data_config(replace(instance, **single), "z")
        assert data == DataConfig(folder="z"), single


IDS = [f"clip{i}" for i in range(6)]
REPEATS = [1.0, 1.5, 0.5, 3.0, 2.25, 0.1]


def test_whole_repeats_are_in_every_epoch_and_parts_of_one_in_some() -> None:
    epochs = Epochs(IDS, 0, REPEATS)
    counts = [epochs.counts(epoch) for epoch in range(40)]
    for i, repeats in enumerate(REPEATS):
        found = [int(count[i]) for count in counts]
        assert sum(found) == repeats * 40
        assert set(found) <= {int(repeats), int(repeats) + 1} and (len(set(found)) == 1) == (
            repeats == int(repeats)
        )
        if repeats == 1.5:
            assert sorted(set(zip(found[::2], found[1::2], strict=True))) in ([(1, 2)], [(2, 1)]), (
                "every second epoch"
            )
    for epoch in range(40):
        assert sorted(epochs.order(epoch)) == sorted(
            i for i in range(6) for _ in range(counts[epoch][i])
        )
        assert epochs.before(epoch + 1) - epochs.before(epoch) == counts[epoch].sum()


def test_an_epoch_depends_on_nothing_but_its_samples() -> None:
    epochs, turned = Epochs(IDS, 3, REPEATS), Epochs(IDS[::-1], 3, REPEATS[::-1])
    fewer = Epochs(IDS[1:], 3, REPEATS[1:])
    for epoch in (0, 1, 2, 50):
        order = [IDS[i] for i in epochs.order(epoch)]
        assert [IDS[::-1][i] for i in turned.order(epoch)] == order
        assert [IDS[1:][i] for i in fewer.order(epoch)] == [id for id in order if id != "clip0"]
    assert epochs.order(0) != Epochs(IDS, 4, REPEATS).order(0)


def test_without_repeats_nothing_changes() -> None:
    for one, other in (
        (BatchSampler(IDS, 1, 4), BatchSampler(IDS, 1, 4, [1.0] * 6)),
        (BucketBatchSampler(IDS, 1, "aabbbc", dict.fromkeys("abc", 2)), BucketBatchSampler(IDS, 1, "aabbbc", dict.fromkeys("abc", 2), [1.0] * 6)),
    ):  # fmt: skip
        assert [one.micro_batch(i) for i in range(30)] == [other.micro_batch(i) for i in range(30)]


def test_the_endless_order_goes_through_all_epochs() -> None:
    epochs, order = Epochs(IDS, 5, REPEATS), BatchSampler(IDS, 5, 4, REPEATS)
    whole = [i for epoch in range(20) for i in epochs.order(epoch)]
    found = [order.micro_batch(index) for index in range(len(whole) // 4)]
    assert [i for places in found for i in places.samples] == whole[: 4 * len(found)]
    assert [places.first for places in found] == [4 * index for index in range(len(found))]
    late = BatchSampler(IDS, 5, 4, REPEATS)
    assert late.micro_batch(30) == order.micro_batch(30), "whatever was asked for before"


def test_the_endless_order_passes_over_empty_epochs() -> None:
    order = BatchSampler(["a", "b"], 0, 1, [0.2, 0.2])
    assert Counter(order.sample(place) for place in range(20)) == {0: 10, 1: 10}


def test_the_grouped_order_cuts_each_epoch_into_batches_of_one_group() -> None:
    sizes = {"a": 2, "b": 3}
    order = BucketBatchSampler(IDS, 5, "aaabbb", sizes, REPEATS)
    epochs = Epochs(IDS, 5, REPEATS)
    index = 0
    for epoch in range(12):
        used: list[int] = []
        while len(used) < epochs.counts(epoch).sum():
            places = order.micro_batch(index)
            assert places.first == epochs.before(epoch) + len(used)
            assert len({"aaabbb"[i] for i in places.samples}) == 1
            assert len(places.samples) <= sizes["aaabbb"[places.samples[0]]]
            used += places.samples
            index += 1
        assert Counter(used) == Counter(epochs.order(epoch))
    assert BucketBatchSampler(IDS, 5, "aaabbb", sizes, REPEATS).micro_batch(
        17
    ) == order.micro_batch(17)
    assert order.mean_size == pytest.approx(epochs.before(12) / index, rel=0.1)
