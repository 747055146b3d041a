"""What is suggested for a word or a path that is not there."""

from pathlib import Path

import pytest

from ditkit_core.config.nearest import nearest_word, path_remedy


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("runs/cats/inputs/checkpoint", "clips/day", "models/wan"):
        (tmp_path / name).mkdir(parents=True)
    for name in (
        "clips/a.png",
        "clips/Üben.png",
        "models/wan/vae.safetensors",
        "models/lora_v2.safetensors",
    ):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "remedy"),
    [
        ("runs/cats/inputs/checkpointt", "did you mean runs/cats/inputs/checkpoint?"),
        ("rns/cat/input/checkpoint", "did you mean runs/cats/inputs/checkpoint?"),
        ("./Clips", "did you mean clips?"),
        ("clip/day", "did you mean clips/day?"),
        ("models/lora_v3.safetensors", "did you mean models/lora_v2.safetensors?"),
        ("models/lora_v2.safetensor", "did you mean models/lora_v2.safetensors?"),
        ("models/lora_v2", "did you mean models/lora_v2.safetensors?"),
        ("clips/U\u0308bel.png", "did you mean clips/Üben.png?"),
        ("clips/no.png", "correct the path"),
        ("quux", "correct the path"),
        ("runs/quux/inputs/checkpoint", "correct the path: runs exists, and contains no quux"),
        ("models\\wan", "it is written with backslashes, as on Windows; write models/wan"),
        ("D:\\clips", "it is a path of Windows; write its path on this machine"),
        (
            "https://example.org/a.png",
            "it is an address; download it, and write the path of the file",
        ),
        (
            "clips/https:/example.org/a.png",
            "it is an address; download it, and write the path of the file",
        ),
        ("clips ", "leave out the spaces around it"),
        ("~nobody-here\0/clips", "correct the path"),
        ("a\0b", "correct the path"),
    ],
)
def test_a_path_that_is_not_there_is_answered_with_the_one_that_is(
    here: Path, written: str, remedy: str
) -> None:
    assert path_remedy(written) == remedy
    if written.startswith(("runs", "models/")):
        absolute = path_remedy(here / written)
        assert absolute == remedy.replace("mean ", f"mean {here}/").replace(
            ": runs exists", f": {here}/runs exists"
        )


def test_a_name_in_another_unicode_form_is_not_suggested_as_if_it_were_another(here: Path) -> None:
    assert path_remedy("clips/U\u0308ben.png").startswith(
        "a name that looks the same is there in another Unicode form"
    )


def test_a_path_from_the_run_files_folder_is_recognised(here: Path) -> None:
    remedy = path_remedy("day", folders=[here / "models", here / "clips"])
    assert remedy == f"paths start at the working directory; did you mean {here}/clips/day?"


def test_a_folder_that_cannot_be_read_is_no_reason_to_fail(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("os.scandir", refuse)
    assert path_remedy("clip") == "correct the path"


@pytest.mark.parametrize(
    ("word", "near"), [("T2V-13b", "t2v-1.3b"), ("t2v_14b", "t2v-14b"), ("hunyuan", ""), ("", "")]
)
def test_a_word_is_compared_whatever_its_case(word: str, near: str) -> None:
    assert nearest_word(word, ["t2v-1.3b", "t2v-14b", "i2v-a14b"]) == near
    assert nearest_word(word, []) == ""
