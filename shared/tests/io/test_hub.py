"""Uploads with the real client, to a hub on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from stand_in_hub import Hub as Server
from stand_in_hub import log_in, stand_in_hub

from ditkit_core.errors import UserError
from ditkit_core.io.hub import Hub, check_hub, upload


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with stand_in_hub(monkeypatch) as hub:
        yield hub


def test_files_are_uploaded_in_one_commit(server: Server, tmp_path: Path) -> None:
    (tmp_path / "fox.safetensors").write_bytes(b"weights" * 1000)
    files: dict[str, Path | bytes] = {
        "README.md": b"# fox",
        "fox.safetensors": tmp_path / "fox.safetensors",
    }
    assert upload(Hub(repository="me/fox"), files, "Add fox") == f"{server.endpoint}/me/fox"
    assert server.files == {"README.md": b"# fox", "fox.safetensors": b"weights" * 1000}
    assert (
        "POST",
        "/api/repos/create",
        {"name": "fox", "organization": "me", "type": "model"},
    ) in [(method, path, {"type": "model", **asked}) for method, path, asked in server.asked]
    hub = Hub(repository="fox", private=True, revision="draft")
    assert upload(hub, files, "Add fox") == f"{server.endpoint}/me/fox/tree/draft"
    created = [asked for _, path, asked in server.asked if path == "/api/repos/create"]
    assert "visibility" not in created[0] and created[1]["visibility"] == "private"
    assert any(path == "/api/models/me/fox/branch/draft" for _, path, _ in server.asked)


@pytest.mark.parametrize(
    ("refuses", "said"),
    [
        ({"": 401}, "the hub answered 401 .*: log in again with `hf auth login`$"),
        ({"/api/": 403}, "the hub answered 403 .*use one with the role write"),
        ({"/commit/": 403}, "the hub answered 403 .*use one with the role write"),
        ({"/preupload/": 404}, "the hub answered 404 .*check the name"),
        ({"/commit/": 500}, "the hub answered 500 .not for you.*; the local files stay"),
    ],
)
def test_a_refusal_is_one_line_with_its_remedy(
    server: Server, refuses: dict[str, int], said: str
) -> None:
    server.refuses = refuses
    with pytest.raises(UserError, match=f"^--push me/fox: {said}") as error:
        upload(Hub(repository="me/fox"), {"README.md": b"# fox"}, "Add fox")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500 and server.files == {}


def test_without_a_network_the_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(
        UserError, match="^--push me/fox: not uploaded to http://127.0.0.1:9 .*; check the network"
    ):
        upload(Hub(repository="me/fox"), {"README.md": b"# fox"}, "Add fox")


def test_what_cannot_work_is_refused_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**settings: str) -> str:
        with pytest.raises(UserError) as error:
            check_hub(Hub(**settings))
        return str(error.value)

    assert "the hub is set to offline; unset HF_HUB_OFFLINE" in refused(repository="me/fox")
    log_in(monkeypatch, "http://127.0.0.1:9")
    check_hub(Hub(repository="me/fox"))
    for wrong in ("me/fox/adapter", "https://huggingface.co/me/fox", "me/", "-x", "me\\fox"):
        assert "is not the id of a repository; write it as NAME/REPO" in refused(repository=wrong)
    card = tmp_path / "card.md"
    assert "card.md does not exist; leave out --push to write it" in refused(
        repository="me/fox", card=str(card)
    )
    card.write_text("# mine")
    check_hub(Hub(repository="me/fox", card=str(card)))
    assert "card.md exists; name another file, or add --push" in refused(card=str(card))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "nobody is logged in to the hub; run `hf auth login`" in refused(repository="me/fox")
