"""`FILE@strength` where FILE is a hub id: what is downloaded, and when. The hub is a folder here."""

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from ditkit_core.adapters.files.entry import is_to_be_fetched, parse_merge
from ditkit_core.errors import UserError
from ditkit_core.models.paths import is_hub_file

HUB = "huggingface_hub.snapshot_download"
KEY = "base.assistant"
ID = "owner/adapter/helper_v2.safetensors"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Repositories that are downloaded, in order; a second time they are in the cache."""
    monkeypatch.chdir(tmp_path)
    folder, asked = tmp_path / "cache", list[str]()

    def download(
        repository: str, *, allow_patterns: list[str], local_files_only: bool = False, **_: object
    ) -> str:
        if local_files_only and not folder.exists():
            raise LocalEntryNotFoundError("nothing here")
        if not local_files_only:
            asked.append(repository)
            folder.mkdir(exist_ok=True)
            if allow_patterns == ["helper_v2.safetensors"]:
                (folder / "helper_v2.safetensors").touch()
        return str(folder)

    monkeypatch.setattr(HUB, download)
    return asked


def test_a_hub_id_is_downloaded_once(downloads, tmp_path):
    assert is_to_be_fetched(ID) and is_to_be_fetched(f"{ID}@0.5") and downloads == []
    assert parse_merge(f"{ID}@0.5", KEY) == (tmp_path / "cache" / "helper_v2.safetensors", 0.5)
    assert (
        parse_merge(ID, KEY)[1] == 1.0
        and downloads == ["owner/adapter"]
        and not is_to_be_fetched(ID)
    )


def test_a_name_that_the_repository_lacks_is_said(downloads):
    with pytest.raises(
        UserError,
        match=r"base.assistant = 'owner/adapter/v9.safetensors': owner/adapter contains no",
    ):
        parse_merge("owner/adapter/v9.safetensors", KEY)


def test_a_local_file_or_folder_of_that_name_counts(downloads, tmp_path):
    (tmp_path / "owner/adapter").mkdir(parents=True)
    assert not is_hub_file(ID) and parse_merge(ID, KEY) == (Path(ID), 1.0)
    assert not is_hub_file("models/helper.safetensors") and not is_hub_file(
        "/models/a/helper.safetensors"
    )
    assert downloads == [] and not is_to_be_fetched(ID)


def test_a_mistyped_path_of_another_setting_waits_for_no_hub(downloads):
    assert parse_merge("runs/cast/exports/a.safetensors", "--adapter") == (
        Path("runs/cast/exports/a.safetensors"),
        1.0,
    )
    assert downloads == []
