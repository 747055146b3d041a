"""What the worker reads for the page Data: each file with its caption where it is stored, and with
all other files of its sample."""

import json
import os
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image
from stand_in_hub import stand_in_hub

from ditkit_core.data.media.clip import write_video
from ditkit_core.errors import UserError
from ditkit_ui import work
from ditkit_ui.run_file import RunFile


def pictures(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (40 * number, 90, 160)).save(folder / name)


def rows_of(tmp_path: Path, family: str, data: str) -> dict[str, dict[str, Any]]:
    """The rows by name, and below an empty name all notes."""
    model = {
        "zimage": '[model]\nbase = "Tongyi-MAI/Z-Image"\npreset = "base"\n',
        "flux2": '[model]\nbase = "black-forest-labs/FLUX.2-klein-base-4B"\npreset = "klein-base-4b"\n',
        "wan": '[model]\npreset = "s2v-14b"\n',
    }
    file = tmp_path / "run.toml"
    file.write_text(f"{model[family]}[data]\nfolder = '{tmp_path / 'photos'}'\n{data}")
    read = work.dataset(family, str(file))
    json.dumps(read)
    return {row["name"]: row for row in read["rows"]} | {"": {"notes": read["notes"]}}


def test_the_caption_of_a_file_is_where_training_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    pictures(folder, "a.png", "b.png", "c.png", "d.png", "sub/e.png")
    (folder / "a.caption").write_text("a")
    (folder / "b.png.txt").write_text("b")
    (folder / "c.json").write_text('{"caption": "of a table"}')
    rows = rows_of(tmp_path, "zimage", 'on_bad = "skip"\n')
    files = {name: Path(row["caption"]).name for name, row in rows.items() if name}
    assert files == {
        "a.png": "a.caption",
        "b.png": "b.png.txt",
        "c.png": "c.txt",
        "d.png": "d.txt",
        "sub/e.png": "e.txt",
    }
    assert (rows["b.png"]["text"], rows["c.png"]["text"]) == ("b", "of a table")
    assert "has no caption" in rows["d.png"]["reason"] and not rows["a.png"]["reason"]
    assert rows["a.png"]["trained"] and str(folder / "a.png") in rows["a.png"]["names"]


def test_rows_of_a_list_say_which_they_are_and_other_lists_are_only_read(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    pictures(folder, "a.png", "b.png", "c.png")
    lines = [{"file_name": "b.png", "text": "of b"}, {"file_name": "a.png"}]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    rows = rows_of(tmp_path, "zimage", 'on_bad = "skip"\n')
    assert rows["b.png"]["row"] == 0 and rows["a.png"]["row"] == 1 and rows[""]["notes"] == []
    assert rows["b.png"]["caption"] == str(folder / "metadata.jsonl")
    assert [rows[name]["text"] for name in ("b.png", "a.png")] == ["of b", ""]
    assert rows["c.png"]["caption"] == "", "the list does not name it"
    (folder / "metadata.jsonl").unlink()
    (folder / "images.txt").write_text("a.png\n")
    (folder / "prompts.txt").write_text("of a\n")
    rows = rows_of(tmp_path, "zimage", "")
    assert (rows["a.png"]["caption"], rows["a.png"]["text"]) == ("", "of a")
    (note,) = rows[""]["notes"]
    assert "images.txt has the captions of this folder: edit them there" in note


def test_names_and_texts_that_no_browser_can_show_are_left_out_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    pictures(folder, "a.png", "b.png")
    name = os.fsdecode(b"caf\xe9.png")
    try:
        pictures(folder, name)
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    (folder / "a.txt").write_text("of a")
    rows = rows_of(tmp_path, "zimage", 'on_bad = "skip"\n')
    assert set(rows) == {"a.png", "b.png", ""}
    (note,) = rows[""]["notes"]
    assert note.encode() and "caf\\udce9.png is not shown" in note and "rename" in note


def test_an_excluded_file_is_a_row_with_its_caption(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    pictures(folder, "a.png", "b.png")
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"of {name}")
    rows = rows_of(tmp_path, "zimage", 'exclude = ["b.png"]\n')
    assert (rows["b.png"]["text"], rows["b.png"]["reason"]) == ("of b", "left out by data.exclude")
    assert rows["b.png"]["excluded"] and rows["b.png"]["id"] == "b.png"
    assert not rows["a.png"]["excluded"] and rows["a.png"]["trained"]


def test_names_of_files_that_are_gone_are_said_and_can_be_removed(tmp_path: Path) -> None:
    """Also with several folders, whose names come before the files'."""
    for folder in (tmp_path / "photos", tmp_path / "more"):
        pictures(folder, "a.png", "b.png")
        for name in "ab":
            (folder / f"{name}.txt").write_text(f"of {name}")
    (tmp_path / "photos" / "b.png").unlink()
    file, base = tmp_path / "run.toml", '[model]\nbase = "Tongyi-MAI/Z-Image"\npreset = "base"\n'
    folders = [str(tmp_path / "photos"), str(tmp_path / "more")]
    file.write_text(
        f"{base}[data]\nfolders = {json.dumps(folders)}\nrepeats = [1, 1]\n"
        'exclude = ["photos/b.png", "more/b.png"]\ncrops = ["photos/a.png=0,1", "more/c.png=0,1"]\n'
    )
    read = work.dataset("zimage", str(file))
    assert (
        "data.exclude has 'photos/b.png', which the dataset does not have"
        in read["stale"]["reason"]
    )
    assert read["stale"]["settings"] == {
        "data.exclude": ["more/b.png"],
        "data.crops": ["photos/a.png=0,1"],
    }
    rows = {row["id"]: row for row in read["rows"]}
    assert rows.keys() == {"photos/a.png", "more/a.png", "more/b.png"} and read["notes"] == []
    assert rows["more/b.png"]["excluded"] and rows["photos/a.png"]["crop"] == (0.0, 1.0)
    assert rows["photos/a.png"]["caption"], "can be written"
    run_file = RunFile(file)
    run_file.set(read["stale"]["settings"])
    assert work.dataset("zimage", str(file))["stale"] is None


def test_masks_and_references_are_with_their_picture_and_no_samples(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    pictures(folder, "a.png", "a-mask.png", "references/a_0.png", "references/a_1.png")
    (folder / "a.txt").write_text("make it red")
    rows = rows_of(tmp_path, "flux2", f"references = '{folder / 'references'}'\n")
    assert set(rows) == {"a.png", ""}
    assert [(extra["name"], extra["kind"], Path(extra["path"]).name) for extra in rows["a.png"]["extras"]] == [
        ("mask", "image", "a-mask.png"),
        ("reference", "image", "a_0.png"),
        ("reference", "image", "a_1.png"),
    ]  # fmt: skip


def test_sound_and_poses_are_with_their_clip(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    write_video(folder / "a.mp4", torch.rand(3, 17, 64, 64), 16.0)
    (folder / "a.txt").write_text("somebody speaks")
    for name in ("sounds", "poses"):
        (tmp_path / name).mkdir()
    write_video(tmp_path / "poses" / "a.mp4", torch.rand(3, 17, 64, 64), 16.0)
    with wave.open(str(tmp_path / "sounds" / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 16000, 0, "NONE", ""))
        sound.writeframes(bytes(32000))
    rows = rows_of(
        tmp_path,
        "wan",
        f"height = 64\nwidth = 64\nframes = 5\ncontrols = ['input_audio={tmp_path / 'sounds'}', "
        f"'s2v_pose_video={tmp_path / 'poses'}']\n",
    )
    assert rows["a.mp4"]["reason"] == "" and rows["a.mp4"]["kind"] == "video"
    assert {(e["name"], e["kind"], Path(e["path"]).name) for e in rows["a.mp4"]["extras"]} == {
        ("input_audio", "audio", "a.wav"),
        ("s2v_pose_video", "video", "a.mp4"),
    }


def test_a_caption_that_is_too_long_is_shortened_to_what_the_encoder_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "photos", "a.png")
    long = "A red card lies here. " * 400
    (tmp_path / "photos" / "a.txt").write_text(long)
    arguments = ["--demo", "--data.folder=photos", "--run.folder=run", "--changed"]
    printed = work.command("zimage", "train", arguments)
    Path("run.toml").write_text(printed["out"])
    work.write_demo("zimage", "run")
    (cut,) = (f for f in work.findings("zimage", "run.toml") if f["code"] == "D14")
    (row,) = work.dataset("zimage", "run.toml")["rows"]
    assert cut["where"] in row["names"]
    shorter = work.shortened("zimage", "run.toml", long, 0)
    assert long.startswith(shorter) and shorter.endswith("here.") and len(shorter) > 100
    (tmp_path / "photos" / "a.txt").write_text(shorter)
    assert not [f for f in work.findings("zimage", "run.toml") if f["code"] == "D14"]
    assert work.shortened("zimage", "run.toml", "A card.", 0) == "A card."


def test_missing_model_files_are_named_with_sizes_and_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, asked = tmp_path / "log", list[object]()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def snapshot(repository: str, local_files_only: bool = False, **wanted: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        if log.read_text():  # what was announced before it
            asked.append(wanted["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    (tmp_path / "vae").mkdir()
    with stand_in_hub(monkeypatch) as hub:
        hub.models["Tongyi-MAI/Z-Image"] = {
            "vae/model.safetensors": 2 * 10**8,
            "transformer/model.safetensors": 12 * 10**9,
        }
        lines = work.missing("zimage", name="zimage_character_8gb")
        assert [line.partition(", from")[0] for line in lines[:2]] == [
            "transformer, 12.00 GB",
            "vae, 0.20 GB",
        ]
        assert work.fetch("zimage", str(log), name="zimage_character_8gb") == 1, (
            "no transformer came"
        )
        assert "fetching transformer, 12.00 GB, from Tongyi-MAI/Z-Image" in log.read_text()
        assert "error: " in log.read_text() and len(asked) == 1
        for part in ("transformer", "text_encoder", "tokenizer"):
            (tmp_path / part).mkdir()
        assert work.fetch("zimage", str(log), name="zimage_character_8gb") == 0
        assert "error: " not in log.read_text() and len(asked) == 5


def test_what_comfyui_has_is_not_missing_for_a_recipe_and_for_a_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run.toml").write_text('[model]\nbase = "Tongyi-MAI/Z-Image"\npreset = "base"\n')
    ways = ({"name": "zimage_character_8gb"}, {"file": str(tmp_path / "run.toml")})
    monkeypatch.setattr(work, "find_files", lambda spec, model, root: {"vae": root / "ae.sft"})
    with stand_in_hub(monkeypatch) as hub:
        hub.models["Tongyi-MAI/Z-Image"] = {"vae/a.safetensors": 9, "transformer/a.safetensors": 9}
        for way in ways:
            both = [line.partition(",")[0] for line in work.missing("zimage", **way)]
            left = work.missing("zimage", comfyui="there", **way)
            assert both[:2] == ["transformer", "vae"]
            assert [line.partition(",")[0] for line in left] == [both[0], *both[2:]]
            assert work.in_comfyui("zimage", "there", **way) == {"model.vae": "there/ae.sft"}
    monkeypatch.undo()
    with pytest.raises(UserError, match="nowhere"):
        work.missing("zimage", comfyui=str(tmp_path / "nowhere"), **ways[1])
