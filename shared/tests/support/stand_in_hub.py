"""A hub on this machine: the part of its HTTP interface that an upload asks, in a thread."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

TOKEN = "hf_of_a_test"
COMMIT = "1" * 40


def blob_id(file: str) -> str:
    """What stands for the hash of a file's content."""
    return hashlib.sha1(file.encode(), usedforsecurity=False).hexdigest()


@dataclass
class Hub:
    """What was uploaded."""

    endpoint: str = ""
    refuses: dict[str, int] = field(default_factory=dict)
    """From a part of a path to the status that requests of it get."""
    files: dict[str, bytes] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their digest."""
    models: dict[str, dict[str, int | None]] = field(default_factory=dict)
    """Repositories to fetch from: size of each file, None if the listing has none."""
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    """Method, path and JSON of each request."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        for part, status in self.refuses.items():
            if part in path:
                return status, {"error": "not for you"}
        if method == "GET":
            return self.listing(path)
        if method == "PUT":
            self.stored[path.rpartition("/")[2]] = body
            return 200, {}
        if path.endswith(("/commit/main", "/commit/draft")):
            self.commit(body)
            return 200, {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"{self.endpoint}/me/fox/commit/{'0' * 40}",
            }
        asked = json.loads(body) if body else {}
        self.asked.append((method, path, asked))
        if path == "/api/repos/create":
            owner = asked.get("organization") or "me"
            return 200, {"url": f"{self.endpoint}/{owner}/{asked['name']}"}
        if "/preupload/" in path:
            modes = {
                each["path"]: "lfs" if each["path"].endswith(".safetensors") else "regular"
                for each in asked["files"]
            }
            return 200, {
                "files": [
                    {"path": p, "uploadMode": mode, "shouldIgnore": False}
                    for p, mode in modes.items()
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            actions = [
                {**each, "actions": {"upload": {"href": f"{self.endpoint}/put/{each['oid']}"}}}
                for each in asked["objects"]
            ]
            return 200, {"transfer": "basic", "objects": actions}
        return 200, {"errors": [], "warnings": []}

    def listing(self, path: str) -> tuple[int, Any]:
        """What `/api/models/owner/name?blobs=true` answers."""
        name = path.partition("?")[0].removeprefix("/api/models/")
        if name not in self.models:
            return 200, {"errors": [], "warnings": []}
        files = [
            {"rfilename": file, "blobId": blob_id(file), **({} if size is None else {"size": size})}
            for file, size in self.models[name].items()
        ]
        return 200, {"id": name, "sha": COMMIT, "siblings": files}

    def commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.stored[value["oid"]]


@contextmanager
def stand_in_hub(patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client library of this process uses, and somebody who is logged in there."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            is_known = self.headers.get(
                "authorization"
            ) == f"Bearer {TOKEN}" or self.path.startswith("/put/")
            status, found = (
                hub.answer(self.command, self.path, body) if is_known else (401, {"error": "who?"})
            )
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    log_in(patch, hub.endpoint)
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def log_in(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """As HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET would, which are read when the library is
    imported."""
    from huggingface_hub import constants

    patch.setenv("HF_TOKEN", TOKEN)
    for name, value in {
        "ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        patch.setattr(constants, name, value)
