"""What published files say of a run: the last part of each path, and everything else as it is."""

import json
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ditkit_core.config.schema import config_fields
from ditkit_core.config.toml import to_toml
from ditkit_core.models.paths import is_hub_id
from ditkit_core.run.config import RunConfig
from ditkit_core.weights.metadata import (
    published_header,
    redact_description,
    redact_path,
    redact_paths,
)

TEXTS = {
    "model.preset", "adapter.targets", "data.trigger", "data.tag_separator", "prior.prompt",
    "encode.device", "train.device",
    "train.devices", "train.checkpointing", "train.token_routing", "train.attention",
    "sample.prompts", "sample.negative", "sample.device",
    "export.forms", "export.dtype", "log.project",
    "adapter.rank_pattern", "adapter.alpha_pattern", "optim.lr_pattern", "flow.slider_positive",
    "flow.slider_negative",
}  # fmt: skip
"""Every key of the configuration that is free text and no path: a new key of text belongs here, or
says that it holds a path."""


def test_every_key_of_text_is_known_to_hold_a_path_or_not() -> None:
    known = config_fields(RunConfig)
    texts = {
        key for key, field in known.items() if field.type in (str, tuple[str, ...], bool | str)
    }
    assert texts - {key for key in texts if known[key].holds != "value"} == TEXTS
    assert {key for key in known if known[key].holds != "value"} <= texts


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/srv/somebody/films/cats", "cats"),
        ("/srv/somebody/films/cats/", "cats"),
        ("~/cats", "cats"),
        ("D:\\films\\somebody\\cats", "cats"),
        ("../somebody/cats", "cats"),
        ("/srv/somebody/style.safetensors@0.5", "style.safetensors@0.5"),
        ("input_image=/srv/somebody/cat.png", "input_image=cat.png"),
        ("mask=cat.png", "mask=cat.png"),
        (str(Path.home()), "~"),
        ("", ""),
        ("/", ""),
    ],
)
def test_of_a_path_the_last_part_is_shown(given: str, shown: str) -> None:
    values = {
        "data.folder": given,
        "data.controls": [given],
        "data.trigger": given,
        "none.such": given,
    }
    again = {
        "data.folder": shown,
        "data.controls": [shown],
        "data.trigger": given,
        "none.such": given,
    }
    assert redact_paths(RunConfig, values) == again


def test_the_id_of_a_hub_is_shown_whole_unless_it_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert redact_path("some-org/some-model/transformer") == "some-org/some-model/transformer"
    (tmp_path / "some-org" / "some-model").mkdir(parents=True)
    assert redact_path("some-org/some-model") == "some-model"


def test_where_there_is_no_home_nothing_is_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user of a container who is in no table of users."""

    def nobody(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pytest.importorskip("pwd"), "getpwuid", nobody)
    with pytest.raises(RuntimeError, match="home"):
        Path.home()
    values = {
        "data.folder": "/srv/somebody/cats",
        "model.base": "~/base",
        "run.folder": "~",
        "data.controls": ["~nobody/x"],
    }
    assert redact_paths(RunConfig, values) == {
        "data.folder": "cats", "model.base": "base", "run.folder": "~", "data.controls": ["x"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("~nobody-here/x", "x"), ("~nobody-here", "~nobody-here"), ("~nobody\0/x", "x"), ("~nobody\0", "~nobody\0"),
        (f"name/{'x' * 300}", f"name/{'x' * 300}"), (f"/srv/{'x' * 300}", "x" * 300),
    ],
)  # fmt: skip
def test_a_path_that_is_none_is_shown_too(
    given: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers of files from elsewhere hold whatever somebody typed; what no file system takes as a
    name lies nowhere here."""
    (tmp_path / "name").mkdir()
    monkeypatch.chdir(tmp_path)
    assert redact_path(given) == shown and is_hub_id(given) == given.startswith("name/")
    assert published_header(RunConfig, {"ditkit.base": given}) == {"ditkit.base": shown}


def test_a_header_holds_the_settings_and_no_folder(tmp_path: Path) -> None:
    config = RunConfig()
    config = replace(
        config, model=replace(config.model, base=f"{tmp_path}/base"), optim=replace(config.optim,
        lr=3e-5),
        data=replace(config.data, folders=(f"{tmp_path}/a", f"{tmp_path}/b"), repeats=(1.0, 2.0)),
    )  # fmt: skip
    text = to_toml(config, shown=redact_paths)
    found = tomllib.loads(text)
    assert str(tmp_path) not in text and str(tmp_path) in to_toml(config)
    assert (found["model"]["base"], found["data"]["folders"], found["optim"]["lr"]) == (
        "base",
        ["a", "b"],
        3e-5,
    )
    assert {name for name in found} == {field.name for field in fields(config)}


def test_the_header_of_an_older_file_loses_its_folders() -> None:
    older = {
        "ditkit.base": "/srv/somebody/base",
        "ditkit.config": 'top = 1\n[data]\nfolder = "/srv/somebody/cats"\nframes = 5\n',
        "who": "/x/y",
    }  # fmt: skip
    found = published_header(RunConfig, older)
    assert (found["ditkit.base"], found["who"]) == ("base", "/x/y")
    assert tomllib.loads(found["ditkit.config"]) == {
        "top": 1,
        "data": {"folder": "cats", "frames": 5},
    }
    assert published_header(RunConfig, found) == found
    for other in (
        "no = toml = here /srv/somebody", 'a = 1\n"a.b" = 2', '"a.b" = 2\na = 1', f"a = {'[' * 9999}", '[a]\n"" = 1\nb = 2',
    ):  # fmt: skip
        assert published_header(RunConfig, {"ditkit.config": other}) == {}, other


def test_a_description_says_no_folder_either() -> None:
    made = json.dumps({"_name_or_path": "/srv/somebody/base", "num_layers": 2}).encode()
    assert json.loads(redact_description(made)) == {"_name_or_path": "base", "num_layers": 2}
    for other in (b'{"num_layers":2}', b"[1]", b"\xff not json"):
        assert redact_description(other) == other
