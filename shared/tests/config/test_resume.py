"""Which changes may be made to a run that is continued."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from ditkit_core.commands.options import TrainOptions
from ditkit_core.config.cli_args import read_flags
from ditkit_core.config.field import setting
from ditkit_core.config.removed import REMOVED
from ditkit_core.config.resume import ConfigChange, compare, refuse
from ditkit_core.config.schema import config_fields, config_values
from ditkit_core.config.toml import read_config_file
from ditkit_core.data.config import DataConfig
from ditkit_core.errors import UserError
from ditkit_core.run.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The `[keys]` section."""

    steps: int = setting(100, resume="free")
    lr: float = setting(1e-4, resume="stated")
    rank: int = setting(16, resume="refused")
    targets: tuple[str, ...] = setting(("q",), resume="refused")
    targets_low: tuple[str, ...] = setting((), resume="refused", part_of="targets")
    files: tuple[str, ...] = setting(("a", "b"), resume="refused", is_set=True)
    alpha: float | None = setting(None, resume="refused")
    kernels: str = setting("auto", resume="stated", asked_again=("triton",))


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree."""

    keys: Keys = Keys()


STORED = {key: value for key, value in config_values(Tree()).items() if value is not None}


def test_nothing_changed_is_no_change() -> None:
    assert compare(STORED, Tree()) == ([], [])


def test_each_change_goes_by_the_rule_of_its_key() -> None:
    config = Tree(keys=Keys(steps=7, lr=1e-3, rank=8, targets=("q", "k"), alpha=2.0))
    changes = compare(STORED, config)
    assert changes.stated == [ConfigChange("keys.lr", 1e-4, 1e-3)]
    assert changes.refused == [
        ConfigChange("keys.rank", 16, 8),
        ConfigChange("keys.targets", ["q"], ["q", "k"]),
        ConfigChange("keys.alpha", None, 2.0),
    ]


def test_the_order_of_a_list_is_a_change_only_where_it_means_something() -> None:
    assert compare(STORED, Tree(keys=Keys(files=("b", "a")))) == ([], [])
    changes = compare(STORED, Tree(keys=Keys(files=("b", "c"))))
    assert changes.refused == [ConfigChange("keys.files", ["a", "b"], ["b", "c"])]
    stored = {**STORED, "keys.targets": ["q", "k"]}
    assert compare(stored, Tree(keys=Keys(targets=("k", "q")))).refused != []
    stored = {"data.exclude": ["a.png", "b.png"], "data.crops": ["c.png=0,1", "d.png=1,0"]}
    data = DataConfig(exclude=("b.png", "a.png"), crops=("d.png=1,0", "c.png=0,1"))
    assert compare(stored, RunConfig(data=data)).refused == []


def test_a_key_that_an_older_version_did_not_store_counts_as_its_default() -> None:
    older = {key: value for key, value in STORED.items() if key != "keys.rank"}
    assert compare(older, Tree()) == ([], [])
    assert compare(older, Tree(keys=Keys(rank=8))).refused == [ConfigChange("keys.rank", 16, 8)]


def test_a_key_that_was_part_of_another_may_have_the_value_of_that() -> None:
    """An older version used that value for both."""
    older = {key: value for key, value in STORED.items() if key != "keys.targets_low"}
    for same in ((), ("q",)):
        assert compare(older, Tree(keys=Keys(targets_low=same))) == ([], [])
    assert compare(older, Tree(keys=Keys(targets_low=("k",)))).refused == [
        ConfigChange("keys.targets_low", [], ["k"])
    ]
    assert compare(STORED, Tree(keys=Keys(targets_low=("q",)))).refused == [
        ConfigChange("keys.targets_low", [], ["q"])
    ]


def test_what_a_machine_decided_is_compared_as_it_was_decided() -> None:
    """Its default is a question, which is no change where a run that is older than the key has no
    answer stored."""
    config = Tree(keys=Keys(kernels="torch"))
    assert compare(STORED | {"keys.kernels": "torch"}, config) == ([], [])
    assert compare(STORED | {"keys.kernels": "triton"}, config).stated == [
        ConfigChange("keys.kernels", "triton", "torch")
    ]
    assert compare(
        {key: value for key, value in STORED.items() if key != "keys.kernels"}, config
    ) == ([], [])


def test_an_optional_value_that_was_set_and_is_not_any_more_is_a_change() -> None:
    assert compare(STORED | {"keys.alpha": 2.0}, Tree()).refused == [
        ConfigChange("keys.alpha", 2.0, None)
    ]


def test_a_key_that_is_no_longer_known_is_stated() -> None:
    changes = compare(STORED | {"keys.gone": 3, "old.key": "x"}, Tree())
    assert (
        changes.stated == [ConfigChange("keys.gone", 3, None), ConfigChange("old.key", "x", None)]
        and not changes.refused
    )


def test_the_refusal_names_each_key_with_both_values_and_the_remedy(tmp_path: Path) -> None:
    message = str(
        refuse(compare(STORED, Tree(keys=Keys(rank=8, targets=()))).refused, Path("runs/a"))
    )
    assert 'keys.rank 16 -> 8; keys.targets ["q"] -> []' in message
    assert "--init-from runs" in message and "--run.folder NEW" in message and "\n" not in message
    run = tmp_path / "my cats"
    of_adapter = [ConfigChange("adapter.rank", 32, 8)]
    for name in ("", "my cats-step-000010", "my cats"):
        if name:
            (run / "exports").mkdir(parents=True, exist_ok=True)
            (run / "exports" / f"{name}.safetensors").touch()
        said = str(refuse(of_adapter, run))
        assert said.endswith(
            f"build on its adapter in a new run with --run.folder NEW --base.merge "
            f"'{run}/exports/{name or 'my cats'}.safetensors'"
        )
    assert "--init-from" in str(refuse([ConfigChange("adapter.method", "lora", "full")], run)), (
        "nothing to merge"
    )
    spaced = str(refuse([], Path("my runs")))
    assert spaced.endswith("--init-from 'my runs'"), "what a shell reads as one word"


@pytest.mark.parametrize(("key", "removed"), REMOVED.items())
def test_removed_keys_are_stated_only_where_they_were_set_and_answered_with_what_took_their_place(
    key, removed, tmp_path
):
    assert compare(STORED | {key: removed.default}, Tree()) == ([], [])
    assert compare(STORED | {key: "another"}, Tree()).stated == [ConfigChange(key, "another", None)]
    section, _, name = key.partition(".")
    file = tmp_path / "run.toml"
    file.write_text(f"[{section}]\n{name} = true\n")
    answer = f"was removed: {removed.instead}; leave it out"
    with pytest.raises(UserError) as refused:
        read_config_file(RunConfig, file)
    assert str(refused.value) == f"{key} in {file} {answer}"
    with pytest.raises(UserError) as refused:
        read_flags([f"--{key}", "true"], RunConfig, TrainOptions)
    assert str(refused.value) == f"--{key} on the command line {answer}"
    named = re.findall(r"\b[a-z]+\.[a-z_]+\b", removed.instead)
    assert set(named) <= config_fields(RunConfig).keys()
    assert read_config_file(RunConfig, file, stored=True) == {}
