"""Which requests the page accepts, and how their input is read.

A client needs the token, and must use one of this machine's own addresses. The token is in the address that ``retouch view``
prints. The first request exchanges it for a cookie that scripts cannot read and other sites cannot send, and is redirected to an
address without the token. Browsers share cookies between the ports of a host, so every server of the host sees the cookie: its name
contains the port, and its value is not the token, but a code of the port under a key of this server, which ends with it.

A request that changes something is a POST of JSON. It needs the cookie, and an ``Origin`` header with the address of the page
itself: a server on another port of this machine has a different origin.
"""

import hmac
import json
import secrets
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retouch_serve.front import Body
from retouch_serve.wire import RequestError, is_from_own_host
from retouch_view.live.runs import Catalogue, LiveRun

FRESH = {"Cache-Control": "no-store"}

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
    """ASGI middleware that checks host, origin and token of every request, and adds security headers to every reply. ``writes``:
    allow POST, for an application with endpoints that change something; otherwise only GET and HEAD are allowed."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str] = (), writes: bool = False) -> None:
        self._app, self._token, self._writes = app, token, writes
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
            # Scripts of other origins cannot send JSON without a CORS preflight.
            own = urlsplit(headers.get("origin", "")).netloc.lower() == headers["host"].lower()
            is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
            may_write = own and is_json and self._has_cookie(headers)
            reply = self._app if may_write else PlainTextResponse("Only the page itself may send this.", 403)
        elif scope["method"] not in ("GET", "HEAD"):
            reply = PlainTextResponse("This page only reads.", 405)
        elif self._has_cookie(headers):
            reply = self._app
        elif _equal(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0], self._token):
            welcome = RedirectResponse("/", 303)
            name, value = self._cookie(headers)
            welcome.set_cookie(name, value, httponly=True, samesite="strict", path="/")
            reply = welcome
        else:
            reply = PlainTextResponse("Open the address that `retouch view` printed; it contains the token.", 401)
        await reply(scope, receive, send_with_headers)

    def _has_cookie(self, headers: Headers) -> bool:
        name, value = self._cookie(headers)
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(name)
        except CookieError:
            return False
        return found is not None and _equal(found.value, value)

    def _cookie(self, headers: Headers) -> tuple[str, str]:
        """Return the name and the value of the cookie for the port to which the request was sent."""
        port = headers["host"].rpartition(":")[2]
        name = f"retouch_view_{port if port.isascii() and port.isdecimal() else 80}"
        return name, hmac.digest(self._key, name.encode(), "sha256").hex()


def _equal(given: str, secret: str) -> bool:
    """In constant time, so that the time of an answer says nothing about the secret."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())


class NotFoundError(Exception):
    """An address names nothing. The text says what there is none of."""


def refused(error: Exception) -> JSONResponse:
    """Return the reply to a request that cannot be answered, with the message of the error."""
    if isinstance(error, NotFoundError):
        return JSONResponse({"error": f"there is no such {error}"}, 404)
    return JSONResponse({"error": str(error)}, error.status if isinstance(error, RequestError) else 409)


async def run_of(request: Request, catalogue: Catalogue) -> LiveRun:
    """Return the run that the address names. Raises NotFoundError if there is none."""
    run = await run_in_threadpool(catalogue.run, request.path_params["name"])
    if run is None:
        raise NotFoundError("run")
    return run


def integer(request: Request, name: str, default: int = 0) -> int:
    """Return a number of at most nine digits from the query string; ``default`` if there is none."""
    given = request.query_params.get(name, "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else default


async def read_object(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the body. Raises RequestError if it is no object, exceeds ``max_bytes``, or arrives too slowly."""
    body = Body(request.app.state.bodies)
    try:
        found = json.loads(await body.read(request, max_bytes=max_bytes))
    except RequestError:
        raise
    except (ValueError, RecursionError):
        raise RequestError("bad_body") from None
    finally:
        body.release()
    if not isinstance(found, dict):
        raise RequestError("bad_body")
    return found
