"""Who gets an answer: the page itself, with its token, under this machine's name."""

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from ditkit_ui.guard import Guard, signature

TOKEN = "secret"
HERE = "127.0.0.1:8401"


def client(host: str = "127.0.0.1") -> TestClient:
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    def answer(request: object) -> PlainTextResponse:
        return PlainTextResponse("hello")

    methods = ["GET", "POST"]
    routes = [
        Route("/", answer, methods=methods),
        Route("/sheet/{rest:path}", answer),
        WebSocketRoute("/socket", socket),
    ]
    guarded = Guard(Starlette(routes=routes), token=TOKEN, host=host, port=8401)
    return TestClient(guarded, base_url=f"http://{HERE}")  # type: ignore[arg-type]


def with_cookie(**arguments: str) -> TestClient:
    answering = client(**arguments)
    assert answering.get(f"/?token={TOKEN}").text == "hello"
    return answering


def test_the_token_becomes_a_cookie_that_no_script_reads_and_leaves_the_address() -> None:
    answer = client().get(f"/?token={TOKEN}&file=a", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/?file=a")
    assert "ditkit_ui_8401=secret" in answer.headers["set-cookie"]
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=strict" in answer.headers["set-cookie"]


@pytest.mark.parametrize("query", ["", "?token=", "?token=secre", "?token=sécret"])
def test_without_the_token_nothing_is_answered(query: str) -> None:
    answer = client().get(f"/{query}")
    assert answer.status_code == 403 and "token" in answer.text
    with pytest.raises(WebSocketDisconnect), client().websocket_connect(f"/socket{query}"):
        pass


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8402"},
        {"origin": "http://[::1"},
        {"host": "evil.example"},
        {"host": "evil.example:8401", "origin": "http://evil.example:8401"},
        {"host": "[::1"},
    ],
)
def test_another_site_gets_no_answer_even_with_the_cookie(headers: dict[str, str]) -> None:
    """`evil.example` may be a name that its owner has given this machine's address."""
    known = with_cookie()
    for method in ("GET", "POST"):
        assert known.request(method, "/", headers=headers).status_code == 403
    # A browser sends the cookie of a host to that host alone; here it is sent all the same.
    told = {"cookie": f"ditkit_ui_8401={TOKEN}", **headers}
    with pytest.raises(WebSocketDisconnect), known.websocket_connect("/socket", headers=told):
        pass


@pytest.mark.parametrize("name", [HERE, "localhost:8401", "[::1]:8401"])
def test_the_page_itself_is_answered_under_every_name_of_the_loopback(name: str) -> None:
    headers = {"host": name, "origin": f"http://{name}", "cookie": f"ditkit_ui_8401={TOKEN}"}
    answer = client().post("/", headers=headers)
    assert answer.text == "hello"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    with client().websocket_connect("/socket", headers=headers) as socket:
        assert socket.receive_text() == "hello"


def test_an_address_for_others_takes_any_name_and_still_needs_the_token() -> None:
    public = with_cookie(host="0.0.0.0")
    assert public.get("/", headers={"cookie": "", "host": "gpu.lan:8401"}).status_code == 403
    headers = {"host": "gpu.lan:8401", "cookie": f"ditkit_ui_8401={TOKEN}"}
    assert public.get("/", headers=headers).text == "hello"
    headers |= {"origin": "http://evil.example"}
    assert public.get("/", headers=headers).status_code == 403


def test_a_signed_address_opens_its_sheet_without_a_cookie_and_nothing_else() -> None:
    signed = signature(TOKEN, "abc")
    assert client().get(f"/sheet/abc/{signed}/a.mp4").text == "hello"
    for path in (
        f"/sheet/abd/{signed}/a.mp4",
        f"/sheet/abc/{signature('another', 'abc')}/a.mp4",
        "/sheet/abc//a.mp4",
        "/sheet/abc/ä/a.mp4",
        f"/?sheet/abc/{signed}/",
    ):
        assert client().get(path).status_code == 403, path
    path = f"/sheet/abc/{signed}/a.mp4"
    assert client().get(path, headers={"origin": "null"}).text == "hello", "its frame"
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        assert client().get(path, headers=headers).status_code == 403
