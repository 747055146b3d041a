"""A run's export on the hub: its files, the card and the samples, and nothing else; a hub on this
machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from stand_in_hub import Hub, log_in, stand_in_hub
from toy_world import World

from ditkit_core.io.safetensors import SafetensorsSource, write_safetensors

FLAGS = (
    "--data.trigger",
    "ohwx_fox",
    "--sample.captions",
    "0",
    "--sample.prompts",
    '["a *red* ohwx_fox", "a: blue one"]',
    "--export.forms",
    '["official", "diffusers"]',
    "--adapter.method",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("private-folder"))
    assert world.train("fox", 2, *FLAGS, "lora") == 0
    return world


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with stand_in_hub(monkeypatch) as found:
        yield found


def export(world: World, name: str, *flags: str) -> int:
    return world.run("export", "--run", str(world.folder / name), *flags)


def card_of(text: str) -> tuple[dict, str]:
    start, metadata, body = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(metadata), body


def test_the_finished_adapters_are_pushed_with_a_card_and_samples(
    trained: World, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.folder / "fox"
    before = sorted(os.listdir(run / "exports"))
    assert export(trained, "fox", "--push", "me/red-fox", "--license", "cc0-1.0", "--private") == 0
    samples = {
        f"samples/{path.name}"
        for path in (run / "samples").glob("step-000002-*.png")
        if "grid" not in path.name
    }
    assert len(samples) == 2
    assert set(hub.files) == {"README.md", "fox.safetensors", "fox_diffusers.safetensors", *samples}
    for name in ("fox.safetensors", "fox_diffusers.safetensors"):
        assert hub.files[name] == (run / "exports" / name).read_bytes()
    assert sorted(os.listdir(run / "exports")) == before, "nothing is exported again"
    assert (
        f"pushed:   {hub.endpoint}/me/red-fox (README.md, fox.safetensors"
        in capsys.readouterr().out
    )

    metadata, body = card_of(hub.files["README.md"].decode())
    prompts = {each["text"]: each["output"]["url"] for each in metadata["widget"]}
    assert set(prompts) == {"a *red* ohwx_fox", "a: blue one"} and set(prompts.values()) == samples
    expected = {
        "library_name": "diffusers",
        "license": "cc0-1.0",
        "instance_prompt": "ohwx_fox",
        "base_model_relation": "adapter",
    }
    assert metadata.items() >= expected.items() and {"lora", "diffusers", "ditkit"} <= set(
        metadata["tags"]
    )
    for said in (
        "# red-fox",
        "A LoRA of rank 2 for `toy.safetensors` (`tiny`), trained for 2 steps",
        "Write `ohwx_fox` in the prompt",
        "- a \\*red\\* ohwx\\_fox",
        "| clips and images | 5 |",
        "| steps | 2 |",
        "| digest of the data | ",
        "<Gallery />",
        "| `fox_diffusers.safetensors` |",
    ):
        assert said in body, body
    everything = b"".join(hub.files.values())
    assert b"private-folder" not in everything and str(trained.folder).encode() not in everything
    assert not [
        name for name in hub.files if "state" in name or "optimizer" in name or "clips" in name
    ]


def test_a_card_is_shown_or_written_without_a_hub_and_may_be_edited(
    trained: World,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, card = (
        trained.folder / "fox" / "exports" / "fox_diffusers.safetensors",
        tmp_path / "card.md",
    )
    capsys.readouterr()
    assert trained.run("export", "--adapter", str(file), "--card", "-") == 0
    printed = capsys.readouterr().out
    assert export(trained, "fox", "--card", str(card)) == 0
    for text in (printed, card.read_text(encoding="utf-8")):
        metadata, body = card_of(text)
        assert (
            len(metadata["widget"]) == 2 and "license" not in metadata and "not stated yet" in body
        )
    assert export(trained, "fox", "--card", str(card)) == 1
    assert "card.md exists; name another file" in capsys.readouterr().err
    card.write_text("# My own words")
    with stand_in_hub(monkeypatch) as hub:
        assert (
            trained.run("export", "--adapter", str(file), "--push", "me/fox", "--card", str(card))
            == 0
        )
        assert (
            hub.files["README.md"] == b"# My own words"
            and hub.files[file.name] == file.read_bytes()
        )
        assert len(hub.files) == 4


def test_a_refused_push_keeps_the_export_and_is_one_line(
    trained: World, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses = {"/commit/": 403}
    out = trained.folder / "mine.safetensors"
    assert export(trained, "fox", "--push", "me/fox", "--to", "official", "--out", str(out)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --push me/fox: the hub answered 403") and error.count("\n") == 1
    assert SafetensorsSource.open(out).metadata["ditkit.step"] == "2"


def test_a_whole_transformer_is_pushed_in_its_folder(
    trained: World, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        export(
            trained, "fox", "--merge", "--push", "me/fox", "--out", str(trained.folder / "whole")
        )
        == 0
    )
    name = "transformer_official/diffusion_pytorch_model.safetensors"
    assert hub.files[name] == (trained.folder / "whole" / name).read_bytes()
    metadata, body = card_of(hub.files["README.md"].decode())
    assert (
        metadata["base_model_relation"] == "finetune"
        and "lora" not in metadata["tags"]
        and "A merged LoRA for" in body
    )


def test_nothing_is_exported_for_somebody_who_is_not_logged_in(
    trained: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_in(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    out = trained.folder / "never.safetensors"
    assert export(trained, "fox", "--push", "me/fox", "--out", str(out)) == 1
    assert "run `hf auth login`" in capsys.readouterr().err and not out.exists()


def test_a_header_with_folders_is_not_published(
    trained: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = SafetensorsSource.open(trained.folder / "fox" / "exports" / "fox.safetensors")
    about = {name: (stored.shape, stored.dtype) for name, stored in source.tensors.items()}
    old = tmp_path / "old.safetensors"
    write_safetensors(
        old, about, source.read, {**source.metadata, "ditkit.base": "/films/secret/wan"}
    )
    assert trained.run("export", "--adapter", str(old), "--card", "-") == 1
    assert (
        "its header names folders of this machine; write it again with --to FORM"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--push", "me/fox", "--rank", "2"),
            "--push and --card take the file of --adapter as it is; convert it first",
        ),
        (("--to", "musubi", "--private"), "--private is for a repository; add --push NAME/REPO"),
        (
            ("--to", "musubi", "--license", "mit"),
            "--license is written into a model card; add --push",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    trained: World, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert trained.run("export", "--adapter", "a.safetensors", *flags) == 2
    assert said in capsys.readouterr().err


def test_samples_whose_list_was_changed_are_not_pushed(
    trained: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained.folder / "fox" / "samples" / "step-000002.json"
    content = path.read_text()
    path.write_text(content.replace("a: blue one", "a: blve one"))
    try:
        assert export(trained, "fox", "--card", str(tmp_path / "card.md")) == 0
    finally:
        path.write_text(content)
    assert (
        f"{path} was changed or damaged since it was written: its samples are left out"
        in capsys.readouterr().err
    )
    assert "widget" not in card_of((tmp_path / "card.md").read_text())[0]
