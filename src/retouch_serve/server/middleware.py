"""The outermost layer of the server: checks the token, and adds an id, metrics and error replies to every request."""

import hmac
import time
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retouch_serve.server.metrics import Metrics
from retouch_serve.server.request_bodies import request_id
from retouch_serve.wire.errors import ERRORS, ErrorCode, is_from_own_host, is_loopback

_PUBLIC_PATHS = ("/livez", "/readyz")
_PATHS = ("/v1/score", "/v1/info", "/score", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs")


def require_token(token: str) -> None:
    """Raise ValueError if the token is too short or has other characters than printable ASCII."""
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token must have at least 16 characters, all ASCII, and no spaces; `openssl rand -hex 32` creates one")


def error_response(code: ErrorCode, *, retry_after: int | None = None) -> JSONResponse:
    """Return the reply for an error. ``retry_after``: seconds for the Retry-After header."""
    status, text = ERRORS[code]
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": code, "message": text}}, status_code=status, headers=headers)


class RequestMiddleware:
    """Wraps the application. With a ``token``, every path except ``/livez`` and ``/readyz`` requires it.

    Without a token, a request must name a loopback address or one of ``hosts`` in its Host header, and must not come from a web
    page of another origin. Otherwise any web page could reach the server through the browser of its visitor (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, *, token: str | None, metrics: Metrics, hosts: Collection[str] = ()) -> None:
        self._app, self._metrics = app, metrics
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), time.monotonic()
        path = scope["path"] if scope["path"] in _PATHS else "other"
        own_id = request_id(headers.get("x-request-id"))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = own_id
            await send(message)

        self._metrics.in_flight.inc()
        try:
            if not self._is_own_host(headers):
                await error_response("wrong_host")(scope, receive, send_with_id)
            elif not self._is_authorized(scope["path"], headers):
                await error_response("unauthorized")(scope, receive, send_with_id)
            else:
                await self._app({**scope, "state": {**scope.get("state", {}), "request_id": own_id}}, receive, send_with_id)
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - started)

    def _is_own_host(self, headers: Headers) -> bool:
        if self._token is not None:
            return True
        return is_from_own_host(headers.getlist("host"), headers.getlist("origin"), self._is_own)

    def _is_own(self, host: str) -> bool:
        """Return whether the host is this machine or one of the names that the user gave."""
        return host in self._hosts or is_loopback(host)

    def _is_authorized(self, path: str, headers: Headers) -> bool:
        if self._token is None or path in _PUBLIC_PATHS:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token)
