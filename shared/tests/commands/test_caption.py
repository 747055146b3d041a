"""The command that has a model write captions: what is written where, what is left alone, and what
is said."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from media_files import LEVELS, numbered_video
from stand_in_hub import stand_in_hub
from tiny_captioner import write_captioner, write_photos

from ditkit_core.commands import cli
from ditkit_core.commands.caption import _checked, _in_template
from ditkit_core.data.caption_files import RECORD_NAME
from ditkit_core.data.media.clip import write_video
from ditkit_core.families.captioner import Answer, Captioner, CaptionRequest
from ditkit_core.testing.scripts import start
from ditkit_core.testing.toy import TOY

HOSTILE_NAMES = (
    "a b", "-rf", "$(id)", "a\nb", "'q\"", "\x1b[31mred", "[bold]x", "{trigger}", "e\u0301", "\u202egnp", "x" * 200,
    "a.b.c", "<|im_end|>", "c\udcff",
)  # fmt: skip

ANSWER = "A red cat sits on the mat."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that always answers `ANSWER`."""
    return str(write_captioner(tmp_path_factory.mktemp("model"), ANSWER))


def run(folder: Path, model: str, *flags: str) -> int:
    return cli.run(TOY, "caption", [str(folder), "--model", model, *flags])


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in sorted(folder.rglob("*.txt"))}


def test_files_without_a_caption_get_one_and_all_others_stay(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png", "sub/c.png", "d.png"])
    write_video(folder / "e.mp4", torch.rand(3, 12, 32, 32), 8.0)
    (folder / "b.txt").write_text("a person's words\n")
    (folder / "d.txt").write_text(" \n")  # empty: nobody's words
    assert run(folder, model, "--trigger", "ohwx") == 0
    line = f"ohwx, {ANSWER}\n"
    assert texts(folder) == {
        "a.txt": line, "b.txt": "a person's words\n", "c.txt": line, "d.txt": line, "e.txt": line,
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "5 files, 1 with a caption (0 by this command); 4 to be written" in said
    assert f"captions by {model}: 0.0 GiB of weights in bf16; 1 at once, up to 320 tokens" in said
    assert "captioner: loaded into memory as a whole (" in said and "free on " in said
    assert "captions: the first took " in said and " s each; 3 more take about " in said
    assert "captions: 4 written" in said
    # A second call has nothing to do, and loads nothing.
    assert run(folder, "/no/such/model", "--trigger", "ohwx") == 0
    assert "5 with a caption (4 by this command); 0 to be written" in capsys.readouterr().out


def test_a_plan_says_what_would_be_done_and_does_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png"])
    (folder / "b.txt").write_text("mine")
    assert run(folder, model, "--plan") == 0
    said = capsys.readouterr().out
    assert "2 files, 1 with a caption (0 by this command); 1 to be written" in said
    assert f"captions by {model}: 0.0 GiB of weights in bf16; 1 at once" in said
    assert "captioner: to be loaded into memory as a whole (" in said
    assert run(folder, model, "--plan", "--encode.streaming", "always") == 0
    assert "captioner: to be read layer by layer for each token" in capsys.readouterr().out
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with stand_in_hub(monkeypatch) as hub:
        hub.models["owner/model"] = {"model.safetensors": 9 * 10**9, "x/y.safetensors": 1}
        assert run(folder, "owner/model", "--plan") == 0
        said = capsys.readouterr()
        assert (
            f"to be fetched: captioner, 9.00 GB, from owner/model on the hub into {tmp_path}"
            in (said.out)
        )
        assert said.err == ""
        hub.refuses["owner/none"] = 404
        assert run(folder, "owner/none", "--plan") == 1
        assert "--model owner/none: no such folder here" in capsys.readouterr().err
    assert run(folder, str(tmp_path), "--plan") == 1
    assert "config.json" in capsys.readouterr().err
    assert texts(folder) == {"b.txt": "mine"} and not (folder / RECORD_NAME).exists()


def test_training_reads_what_was_written(model: str, tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png"])
    assert run(folder, model) == 0
    from ditkit_core.api.dataset import completed, read_dataset
    from ditkit_core.data.config import DataConfig

    dataset = read_dataset(
        completed(DataConfig(folder=str(folder), frames=1), TOY.data), TOY.data, ()
    )
    assert dataset.captions == [ANSWER, ANSWER] and dataset.excluded == []


def test_only_what_this_command_wrote_and_nobody_changed_is_written_again(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png", "c.png"])
    (folder / "c.txt").write_text("a person's")
    assert run(folder, model) == 0
    (folder / "b.txt").write_text("corrected by a person")
    assert run(folder, model, "--trigger", "ohwx") == 0, "without --replace nothing changes"
    assert texts(folder)["a.txt"] == f"{ANSWER}\n"
    assert run(folder, model, "--trigger", "ohwx", "--replace", "model") == 0
    assert texts(folder) == {
        "a.txt": f"ohwx, {ANSWER}\n", "b.txt": "corrected by a person", "c.txt": "a person's",
    }  # fmt: skip
    capsys.readouterr()
    assert run(folder, model, "--trigger", "ohwx", "--replace", "all", "--plan") == 0
    said = capsys.readouterr().out
    assert "2 to be written, replacing 2 that are there (2 not by this command)" in said
    assert run(folder, model, "--trigger", "ohwx", "--replace", "all") == 0
    assert set(texts(folder).values()) == {f"ohwx, {ANSWER}\n"}


def test_a_caption_that_is_written_meanwhile_stays(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png"])
    answers = Captioner.answers

    def slowly(self: Captioner, requests: object) -> object:
        (folder / "b.txt").write_text("just now")
        return answers(self, requests)

    monkeypatch.setattr(Captioner, "answers", slowly)
    assert run(folder, model) == 0
    assert texts(folder) == {"a.txt": f"{ANSWER}\n", "b.txt": "just now"}
    assert "left alone, since somebody has changed them meanwhile: b.png" in capsys.readouterr().err


_KILLED = """
import os, signal, sys
from pathlib import Path
from ditkit_core.commands import cli
from ditkit_core.data import caption_files
from ditkit_core.testing.toy import TOY
folder, model = sys.argv[1:]
write_text = caption_files.write_text
def killing(path, text):
    write_text(path, text)
    if path.name == "c.txt":  # after the caption, and before it is recorded
        os.kill(os.getpid(), signal.SIGKILL)
caption_files.write_text = killing
cli.run(TOY, "caption", [folder, "--model", model])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="is killed by a signal")
def test_a_killed_command_continues(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png", "c.png", "d.png", "e.png"])
    script, printed = tmp_path / "killed.py", tmp_path / "printed"
    script.write_text(_KILLED)
    killed = start(script, str(folder), model, out=printed, err=printed)
    killed.join(250)
    assert killed.exitcode == -9, printed.read_text(errors="replace")
    assert list(texts(folder)) == ["a.txt", "b.txt", "c.txt"]
    with (folder / RECORD_NAME).open("a") as record:
        record.write('{"file": "torn')
    assert run(folder, model) == 0
    assert "(2 by this command); 2 to be written" in capsys.readouterr().out
    assert list(texts(folder)) == ["a.txt", "b.txt", "c.txt", "d.txt", "e.txt"]
    assert set(texts(folder).values()) == {f"{ANSWER}\n"}
    assert not list(folder.glob("*.tmp")) + list(folder.glob(".*.tmp"))


LISTS = {
    "metadata.jsonl": (
        '{"file_name": "a.png", "text": "mine", "n": 1}\n\n{"file_name": "b.png", "n": "\\u00e9"}\n',
        '{"file_name": "a.png", "text": "mine", "n": 1}\n\n{"file_name": "b.png", "n": "\\u00e9", "text": "'
        + ANSWER
        + '"}\n',
    ),
    "metadata.csv": (
        'image,n\na.png,"1, 2"\nb.png,3\n',
        f'image,n,text\na.png,"1, 2",{ANSWER}\nb.png,3,{ANSWER}\n',
    ),
    "metadata.json": (
        '[{"path": "a.png", "prompt": ["mine"]}, {"path": "b.png", "prompt": " "}]',
        json.dumps(
            [{"path": "a.png", "prompt": ["mine"]}, {"path": "b.png", "prompt": ANSWER}], indent=2
        )
        + "\n",
    ),
}


@pytest.mark.parametrize("name", list(LISTS))
def test_a_list_gets_captions_in_its_column_and_keeps_everything_else(
    model: str, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png"])
    before, after = LISTS[name]
    (folder / name).write_text(before)
    assert run(folder, model) == 0
    assert (folder / name).read_text() == after and texts(folder) == {}
    assert run(folder, "/no/such/model") == 0
    assert "0 to be written" in capsys.readouterr().out
    assert (folder / name).read_text() == after


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"videos.txt": "a.png\n", "prompts.txt": "mine\n"}, "write metadata.jsonl with a line"),
        ({"metadata.csv": "image,n\na.png,1,2\n"}, "line 2 has more fields than the header"),
        ({"metadata.jsonl": "3\n"}, "line 1 is not a JSON object"),
        ({"metadata.json": "{}"}, "is not a JSON list"),
        ({"metadata.json": "[]"}, "has no media file; name a folder with images or clips"),
        ({"metadata.jsonl": "", "metadata.csv": "image\n"}, "set data.metadata to the right one"),
    ],
    ids=["lists", "fields", "row", "list", "empty", "both"],
)
def test_a_dataset_that_cannot_be_written_is_refused_in_a_line(
    tmp_path: Path, files: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png"])
    for name, text in files.items():
        (folder / name).write_text(text)
    assert run(folder, "/no/such/model") == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert {name: (folder / name).read_text() for name in files} == files


def test_hostile_names_are_captioned_and_printed_in_one_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{name}.png" for name in HOSTILE_NAMES]
    folder = write_photos(tmp_path / "photos", names)
    assert run(folder, model, "--preview", "99") == 0
    assert texts(folder) == {} and not (folder / RECORD_NAME).exists()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(f": {ANSWER}") for line in lines) == len(names)
    assert all(line.isprintable() for line in lines)
    assert run(folder, model) == 0
    assert len(texts(folder)) == len(names) and set(texts(folder).values()) == {f"{ANSWER}\n"}


def test_what_cannot_be_read_is_named_and_the_others_are_written(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "c.png"])
    (folder / "b.png").write_bytes(b"no image")
    write_photos(tmp_path / "elsewhere", ["x.png"])
    (folder / "d.png").symlink_to(tmp_path / "elsewhere" / "x.png")
    assert run(folder, model, "--batch", "4") == 1
    error = capsys.readouterr().err
    assert "not written: b.png: " in error and "cannot be read as an image" in error
    assert "not written: d.png: " in error and "leaves the dataset folder" in error
    assert error.splitlines()[-1].startswith("error: 2 files got no caption")
    assert list(texts(folder)) == ["a.txt", "c.txt"]


def test_what_a_model_answers_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = str(write_captioner(tmp_path / "refusing", "I cannot describe people."))
    folder = write_photos(tmp_path / "photos", ["a.png"])
    assert run(folder, refusing) == 1 and texts(folder) == {}
    assert "not written: a.png: the answer has the refusal of a chat model" in (
        capsys.readouterr().err
    )
    endless = str(write_captioner(tmp_path / "endless", "A cat. A1 dog", ends=False))
    assert run(folder, endless, "--max-tokens", "4") == 0
    assert texts(folder) == {"a.txt": "A cat.\n"}
    assert "cut at --max-tokens 4, and written up to the last whole sentence: a.png" in (
        capsys.readouterr().err
    )


def test_an_edit_is_asked_for_with_the_images_before_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png"])
    before = write_photos(tmp_path / "before", ["x.png", "y.png", "a_0.png", "a_1.png"])
    for name in ("x.png", "y.png"):
        (before / name).unlink()
    asked: list[CaptionRequest] = []
    answers = Captioner.answers

    def look(self: Captioner, requests: Sequence[CaptionRequest]) -> list[Answer]:
        asked.extend(requests)
        return answers(self, requests)

    monkeypatch.setattr(Captioner, "answers", look)
    assert run(folder, model, "--data.references", str(before)) == 0
    edit, plain = asked
    assert [image.shape[0] for image in edit.images] == [32, 36, 24], "before, then after"
    assert "2 images before an edit, and then an image after it" in edit.prompt
    assert len(plain.images) == 1 and plain.prompt.startswith("Describe this image: the subject")


def test_a_video_is_shown_by_frames(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    numbered_video(folder / "a.mp4", frames=24, fps=24.0)
    asked: list[CaptionRequest] = []

    def look(self: Captioner, requests: Sequence[CaptionRequest]) -> list[Answer]:
        asked.extend(requests)
        return [Answer(text="It moves.", is_cut=False)]

    monkeypatch.setattr(Captioner, "answers", look)
    assert run(folder, model, "--goal", "motion", "--frames", "4") == 0
    assert [round(float(image.mean()) / LEVELS) for image in asked[0].images] == [3, 9, 15, 21]
    assert "Begin with the motion" in asked[0].prompt and "4 frames" in asked[0].prompt


@pytest.mark.parametrize(
    ("text", "is_cut", "caption", "problem"),
    [
        ("A cat.\n Asleep.", False, "A cat. Asleep.", ""),
        ("", False, "", "is empty"),
        ("A cat sits on", True, "A cat sits on", "cut at the limit"),
        ('He says "no." Then he', True, 'He says "no."', ""),
        ("Sure! Here is a caption: a cat", False, None, "opening of a chat model"),
        ("A cat<|im_end|>", False, None, "a token of the model's chat: '<|im_end|>'"),
        ("A cat.\n# Colours", False, None, "marks of a text's layout"),
        ("A cat. " * 9, True, None, "says the same again and again"),
        ("A cat is here. A dog is there. A cat sleeps. A dog runs. Both are red.", False, None, ""),
        ("<think>A cat</think>", False, None, "marks of a text's layout"),
    ],
)
def test_leftovers_of_a_chat_are_no_caption(
    text: str, is_cut: bool, caption: str | None, problem: str
) -> None:
    found, said = _checked(Answer(text=text, is_cut=is_cut))
    assert problem in said and bool(problem) == bool(said)
    assert caption is None or found == caption


def test_the_trigger_stands_where_it_was_wanted() -> None:
    assert _in_template("a cat", "ohwx", "") == "ohwx, a cat"
    assert _in_template("ohwx sits", "ohwx", "") == "ohwx sits"
    assert _in_template("a cat", "", "") == "a cat"
    assert _in_template("a {trigger}", "ohwx", "{caption}, by {trigger}") == "a {trigger}, by ohwx"


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--template", "ohwx"], 2, "has no {caption}"),
        (["--template", "{trigger}: {caption}"], 1, "no trigger word is set; add --trigger WORD"),
        (["--words", "80"], 2, "--words must be two numbers"),
        (["--max-tokens", "0"], 2, "--max-tokens 0 is too small"),
        (["--model", "no/such/folder/or/id/.."], 1, "no such file or folder"),
        (["--goal", "edit"], 1, "it has no references"),
        (["--goal", "stile"], 2, "must be one of scene, character"),
    ],
)
def test_mistakes_are_said_in_a_line(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    message: str,
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png"])
    named = [] if "--model" in flags else ["--model", model]
    assert cli.run(TOY, "caption", [str(folder), *named, *flags]) == status
    error = capsys.readouterr().err
    assert message in error and texts(folder) == {}


def test_a_folder_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(TOY, "caption", ["/no/such/photos"]) == 1
    error = capsys.readouterr().err
    assert "/no/such/photos" in error and error.count("\n") == 1


def test_too_little_memory_is_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_photos(tmp_path / "photos", ["a.png", "b.png"])

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nMore of it.")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    assert run(folder, model) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: out of memory while captioning: try --batch 1, ")
    assert error.endswith(
        "what was written stays (CUDA out of memory. Tried to allocate 3.00 GiB.)\n"
    )
    assert error.count("\n") == 1 and texts(folder) == {}
