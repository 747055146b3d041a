"""Answers only the page itself: other sites, other names for this machine and strangers are
refused, and a browser loads nothing from elsewhere."""

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from ditkit_core.diagnostics.report.server import is_loopback
from ditkit_ui import texts

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "frame-ancestors 'self'; base-uri 'self'; form-action 'self'; object-src 'none'"
)
"""Vue compiles templates in the browser, hence unsafe-eval; nothing is loaded from another site."""


def signature(token: str, key: str) -> str:
    """What an address has instead of the cookie, below `/sheet/KEY/`: a page of no site, in a frame
    without rights, gets no cookie and shows the files next to it. It opens that folder alone."""
    return hmac.new(token.encode(), key.encode(), "sha256").hexdigest()


class Guard:
    """Middleware around the whole application, its web socket included.

    Args:
        token: The secret in the address that is printed. It becomes a cookie: other users of this
            machine reach its loopback address as well, and a page that starts programs is not for
            them.
        host: The address that is listened at.
        port: Its port. Cookies are shared by all ports of a name, so theirs has it.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str, port: int):
        self.app, self._token, self._host = app, token, host
        self._cookie = f"ditkit_ui_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        query_token = query.pop("token", [""])[0]
        if reason := self._refusal(headers, query_token, scope["path"]):
            is_socket = scope["type"] == "websocket"
            answer = WebSocketClose(1008) if is_socket else PlainTextResponse(reason, 403)
            await answer(scope, receive, send)
            return
        if query_token:  # out of the address, which is kept in the browser's history
            rest = urlencode(query, doseq=True)
            redirect = RedirectResponse(f"{scope['path']}{'?' if rest else ''}{rest}", 303)
            redirect.set_cookie(self._cookie, query_token, httponly=True, samesite="strict")
            await redirect(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer_headers = MutableHeaders(scope=message)
                answer_headers.setdefault("Content-Security-Policy", _POLICY)
                answer_headers["X-Content-Type-Options"] = "nosniff"
                answer_headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self.app(scope, receive, send_with_policy)

    def _refusal(self, headers: Headers, query_token: str, path: str) -> str:
        """Why a request is refused; empty if it is not."""
        host, origin = headers.get("host", ""), headers.get("origin")
        route, key, signed = (*path.split("/", 4)[1:4], "", "", "")[:3]
        is_signed = route == "sheet" and secrets.compare_digest(
            signed.encode(), signature(self._token, key).encode()
        )
        try:
            # Another site could give its name this machine's address, and so read the page.
            if is_loopback(self._host) and not is_loopback(urlsplit(f"//{host}").hostname or ""):
                return texts.REFUSED_HOST
            # A frame without rights is of the origin `null`, and asks for clips with that.
            is_frame = is_signed and origin == "null"
            if origin is not None and not is_frame and urlsplit(origin).netloc != host:
                return texts.REFUSED_ORIGIN
        except ValueError:  # brackets that are no address
            return texts.REFUSED_HOST
        if is_signed:
            return ""
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            morsel = None
        token = query_token or (morsel.value if morsel else "")
        is_known = secrets.compare_digest(token.encode(), self._token.encode())
        return "" if is_known else texts.REFUSED_TOKEN
