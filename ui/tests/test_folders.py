"""Nothing outside the opened folders is named, by `..`, by links, or by odd names."""

from pathlib import Path

import pytest

from ditkit_core.errors import UserError
from ditkit_ui.captions import CaptionEdits
from ditkit_ui.folders import OpenedFolders


@pytest.fixture
def folders(tmp_path: Path) -> OpenedFolders:
    (tmp_path / "open" / "inside").mkdir(parents=True)
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "secret.txt").write_text("secret")
    (tmp_path / "open" / "link.txt").symlink_to(tmp_path / "closed" / "secret.txt")
    (tmp_path / "open" / "away").symlink_to(tmp_path / "closed")
    return OpenedFolders([tmp_path / "open"])


@pytest.mark.parametrize(
    "path",
    [
        "closed/secret.txt",
        "open/../closed/secret.txt",
        "open/link.txt",
        "open/away/secret.txt",
        "opened",
        ".",
        "/etc/passwd",
        "open/\0",
        "~nobody-of-this-name/x",
    ],
)
def test_a_path_elsewhere_is_neither_read_nor_written(
    folders: OpenedFolders, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    captions = CaptionEdits(folders, [])
    for act in (
        lambda: folders.checked(path),
        lambda: captions.text(path),
        lambda: captions.write({path: (None, "owned")}),
        lambda: captions.watch([path]),
    ):
        with pytest.raises(UserError, match="in no folder that was opened"):
            act()
    assert (tmp_path / "closed" / "secret.txt").read_text() == "secret"


def test_a_folder_that_a_person_names_is_opened(
    folders: OpenedFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folders.checked("open/inside/new.txt") == tmp_path / "open" / "inside" / "new.txt"
    assert folders.open(" closed ") == tmp_path / "closed"
    assert folders.checked("open/link.txt") == tmp_path / "closed" / "secret.txt"
    for text in ("", "none", "closed/secret.txt"):
        with pytest.raises(UserError, match="is no folder"):
            folders.open(text)
