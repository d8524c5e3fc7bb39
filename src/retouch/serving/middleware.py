"""The outermost layer of the server: checks the token, and adds an id, metrics and error replies to every request."""

import hmac
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retouch.rewards.wire.errors import ERRORS, ErrorCode
from retouch.serving.metrics import Metrics
from retouch.serving.request_body import request_id

_PUBLIC_PATHS = ("/livez", "/readyz")
_PATHS = ("/v1/score", "/v1/info", "/score", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs")


def error_response(code: ErrorCode, *, retry_after: int | None = None) -> JSONResponse:
    """The reply for an error; ``retry_after``: seconds."""
    status, text = ERRORS[code]
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": code, "message": text}}, status_code=status, headers=headers)


class RequestMiddleware:
    """Wraps the application. With a ``token``, every path except ``/livez`` and ``/readyz`` requires it."""

    def __init__(self, app: ASGIApp, *, token: str | None, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
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
            if not self._is_authorized(scope["path"], headers):
                await error_response("unauthorized")(scope, receive, send_with_id)
            else:
                await self._app({**scope, "state": {**scope.get("state", {}), "request_id": own_id}}, receive, send_with_id)
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - started)

    def _is_authorized(self, path: str, headers: Headers) -> bool:
        if self._token is None or path in _PUBLIC_PATHS:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token)
