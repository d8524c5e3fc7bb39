"""Authenticates requests: a client needs the token, and must use one of this machine's own addresses.

The token is in the address that ``retouch view`` prints. The first request exchanges it for a cookie that scripts cannot read and
other sites cannot send, and is redirected to an address without the token. Browsers share cookies between the ports of a host, so
every server of the host sees the cookie: its name contains the port, and its value is not the token, but a code of the port under a
key of this server, which ends with it.

A request that changes something is a POST of JSON. It needs the cookie, and an ``Origin`` header with the address of the page
itself: a server on another port of this machine has a different origin.
"""

import hmac
import secrets
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retouch_serve.wire.errors import is_from_own_host

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Gate:
    """ASGI middleware that checks host, origin and token of every request, and adds security headers to every reply.

    ``writes``: allow POST, for an application with endpoints that change something; otherwise only GET and HEAD are allowed.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str] = (), writes: bool = False) -> None:
        self._app, self._token, self._writes = app, token.encode(), writes
        self._key = secrets.token_bytes(32)
        self._hosts = frozenset((*_LOOPBACK, *(host.lower() for host in hosts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        if not is_from_own_host(headers.getlist("host"), headers.getlist("origin"), self._hosts.__contains__):
            reply: ASGIApp = PlainTextResponse("This server answers only to its own address.", 421)
        elif scope["method"] == "POST" and self._writes:
            reply = self._app if self._may_write(headers) else PlainTextResponse("Only the page itself may send this.", 403)
        elif scope["method"] not in ("GET", "HEAD"):
            reply = PlainTextResponse("This page only reads.", 405)
        elif self._has_cookie(headers):
            reply = self._app
        elif self._is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]):
            reply = self._welcome(headers)
        else:
            reply = PlainTextResponse("Open the address that `retouch view` printed; it contains the token.", 401)
        await reply(scope, receive, send_with_headers)

    def _welcome(self, headers: Headers) -> RedirectResponse:
        reply = RedirectResponse("/", 303)
        name, value = self._cookie(headers)
        reply.set_cookie(name, value, httponly=True, samesite="strict", path="/")
        return reply

    def _may_write(self, headers: Headers) -> bool:
        """Whether a script of the page sent the request. Scripts of other origins cannot send JSON without a CORS preflight."""
        own = urlsplit(headers.get("origin", "")).netloc.lower() == headers["host"].lower()
        is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        return own and is_json and self._has_cookie(headers)

    def _has_cookie(self, headers: Headers) -> bool:
        name, value = self._cookie(headers)
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode("utf-8", "surrogateescape"), value.encode())

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token)

    def _cookie(self, headers: Headers) -> tuple[str, str]:
        """Return the name and the value of the cookie for the port to which the request was sent."""
        port = headers["host"].rpartition(":")[2]
        name = f"retouch_view_{port if port.isascii() and port.isdecimal() else 80}"
        return name, hmac.digest(self._key, name.encode(), "sha256").hex()
