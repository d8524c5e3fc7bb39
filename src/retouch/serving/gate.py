"""The outermost layer: the token, and the id, status and time of every request."""

import hmac
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retouch.rewards.wire.errors import ERRORS, ErrorCode
from retouch.serving.metrics import Metrics
from retouch.serving.reception import request_id

OPEN_PAGES = ("/livez", "/readyz")
_PAGES = ("/v1/score", "/v1/info", "/score", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs")


def refusal(code: ErrorCode, *, retry_after: int | None = None) -> JSONResponse:
    """The answer that says why not."""
    status, text = ERRORS[code]
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": code, "message": text}}, status_code=status, headers=headers)


class Gate:
    """Wraps the application. With a ``token`` every page but ``/livez`` and ``/readyz`` needs it."""

    def __init__(self, app: ASGIApp, *, token: str | None, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), time.monotonic()
        page = scope["path"] if scope["path"] in _PAGES else "other"
        name = request_id(headers.get("x-request-id"))
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        self._metrics.in_flight.inc()
        try:
            if not self._may(scope["path"], headers):
                await refusal("unauthorized")(scope, receive, answer)
            else:
                await self._app({**scope, "state": {**scope.get("state", {}), "request_id": name}}, receive, answer)
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(page, str(status)).inc()
            self._metrics.seconds.labels(page).observe(time.monotonic() - started)

    def _may(self, path: str, headers: Headers) -> bool:
        if self._token is None or path in OPEN_PAGES:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token)
