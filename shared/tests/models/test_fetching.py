"""What is said before a download, with the real client and a hub on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from stand_in_hub import COMMIT, Hub, blob_id, stand_in_hub

from ditkit_core.errors import UserError
from ditkit_core.models.paths import ModelPaths, locate_model, nothing_fetched

ID = "owner/model"
FILES: dict[str, int | None] = {
    "model_index.json": 1000,
    "vae/config.json": 1000,
    "vae/diffusion_pytorch_model.safetensors": 500_000_000,
    "vae/diffusion_pytorch_model.bin": 500_000_000,
    "transformer/model.safetensors": 20_000_000_000,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with one model, an empty cache, and downloads that fetch nothing but are counted."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(*_: object, local_files_only: bool = False, **__: object) -> str:
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        return str(tmp_path / "fetched")

    for part in ("vae", "transformer", "scheduler"):
        (tmp_path / "fetched" / part).mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with stand_in_hub(monkeypatch) as server:
        server.models[ID] = dict(FILES)
        yield server


def cached(tmp_path: Path, *names: str) -> None:
    for name in names:
        path = tmp_path / "cache" / "models--owner--model" / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_download_says_what_how_much_from_where_to_where_and_what_does_instead(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ModelPaths(base=ID).locate("vae")
    printed = capsys.readouterr()
    assert printed.err == (
        f"fetching vae, 0.50 GB, from owner/model on the hub into {tmp_path / 'cache'}; "
        "a file or folder that is here, set as model.vae, does instead\n"
    )
    assert not printed.out, "stdout may be a configuration or JSON"
    ModelPaths(transformer=ID).locate("transformer")
    assert "fetching transformer, 20.00 GB, " in capsys.readouterr().err


def test_what_the_cache_has_is_not_counted_and_a_full_cache_says_nothing(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached(tmp_path, "vae/diffusion_pytorch_model.safetensors")
    ModelPaths(base=ID).locate("vae")
    assert "fetching vae, less than 0.01 GB, " in capsys.readouterr().err
    cached(tmp_path, "model_index.json", "vae/config.json")
    ModelPaths(base=ID).locate("vae")
    assert not capsys.readouterr().err


def test_a_file_that_an_older_commit_has_is_not_counted(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs = tmp_path / "cache" / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / blob_id("vae/diffusion_pytorch_model.safetensors")).touch()
    ModelPaths(base=ID).locate("vae")
    assert "fetching vae, less than 0.01 GB, " in capsys.readouterr().err


@pytest.mark.parametrize("listing", ["fails", "has no sizes"])
def test_a_listing_without_sizes_says_that_the_size_is_unknown(
    hub: Hub, listing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if listing == "fails":
        hub.refuses["/api/models/"] = 500
    else:
        hub.models[ID]["vae/diffusion_pytorch_model.safetensors"] = None
    ModelPaths(base=ID).locate("vae")
    assert "fetching vae, of unknown size, from owner/model " in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403, 404])
def test_nothing_is_announced_where_the_hub_refuses(
    hub: Hub, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses["/api/models/"] = status
    ModelPaths(base=ID).locate("vae")
    assert not capsys.readouterr().err


def test_nothing_is_announced_where_nothing_may_be_fetched(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    with nothing_fetched(), pytest.raises(UserError):
        ModelPaths(base=ID).locate("vae")
    assert not capsys.readouterr().err and not hub.asked


def test_a_part_without_a_key_names_the_base(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.models[ID]["scheduler/scheduler_config.json"] = 500
    ModelPaths(base=ID).locate("scheduler")
    assert (
        "a folder with all parts of the model, set as model.base, does instead"
        in capsys.readouterr().err
    )


def test_what_would_be_fetched_is_said_without_fetching(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = f"from owner/model on the hub into {tmp_path / 'cache'}"
    assert ModelPaths(base=ID).to_fetch("vae") == f"vae, 0.50 GB, {into}"
    assert ModelPaths(transformer=ID).to_fetch("transformer") == f"transformer, 20.00 GB, {into}"
    hub.models["owner/vae"] = {"model.safetensors": 3 * 10**9, "x/model.safetensors": 10**9}
    assert ModelPaths(vae="owner/vae").to_fetch("vae").startswith("vae, 3.00 GB, from owner/vae on")
    assert ModelPaths(base=str(tmp_path / "fetched")).to_fetch("vae") == ""
    hub.refuses["owner/none"] = 404
    assert "does not have it" in ModelPaths(base="owner/none").to_fetch("vae")
    assert capsys.readouterr() == ("", "")


def test_a_model_that_stands_for_itself_names_its_flag(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.models[ID] = {"model.safetensors": 9 * 10**9, "original/consolidated.safetensors": 10**9}
    assert locate_model(ID, "--model", "captioner") == tmp_path / "fetched"
    assert capsys.readouterr().err == (
        f"fetching captioner, 9.00 GB, from owner/model on the hub into {tmp_path / 'cache'}; a "
        "folder that is here, given as --model FOLDER, does instead\n"
    )
    assert locate_model(str(tmp_path), "--model", "captioner") == tmp_path
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file; name the folder of the model"):
        locate_model(str(tmp_path / "file"), "--model", "captioner")


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_announces(
    hub: Hub, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    ModelPaths(base=ID).locate("vae")
    assert bool(capsys.readouterr().err) == (rank == 0)
