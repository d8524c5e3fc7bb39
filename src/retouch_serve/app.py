"""The HTTP endpoints of a reward server, and the outermost layer that checks who asks."""

import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retouch_serve.requests import SingleScore, SingleScoreReply, SingleScoreRequest, decode_single_score, read_deadline
from retouch_serve.service import Metrics, ScoreReply, Service
from retouch_serve.wire import ERRORS, BatchDocument, ErrorCode, RequestError, ServerInfo, is_from_own_host, is_loopback

RETRY_SECONDS = 1
_PUBLIC_PATHS = ("/livez", "/readyz")
_PATHS = ("/v1/score", "/v1/info", "/score", "/livez", "/readyz", "/metrics", "/openapi.json", "/docs")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LOG = logging.getLogger("retouch.serving")


def require_token(token: str) -> None:
    """Raise ValueError if the token is too short or has other characters than printable ASCII."""
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError("the token must have at least 16 characters, all ASCII, and no spaces; `openssl rand -hex 32` creates one")


def error_response(code: ErrorCode, *, retry_after: int | None = None) -> JSONResponse:
    """The reply for an error. ``retry_after``: seconds for the Retry-After header."""
    status, text = ERRORS[code]
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": {"code": code, "message": text}}, status_code=status, headers=headers)


class RequestMiddleware:
    """Wraps the application: checks the token, and adds an id, metrics and error replies to every request.

    With a ``token``, every path except ``/livez`` and ``/readyz`` requires it. Without a token, a request must name a loopback
    address or one of ``hosts`` in its Host header, and must not come from a web page of another origin. Otherwise any web page
    could reach the server through the browser of its visitor (DNS rebinding).
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
        own_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(own_id):
            own_id = secrets.token_hex(8)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = own_id
            await send(message)

        self._metrics.in_flight.inc()
        try:
            refusal = self._refusal(scope["path"], headers)
            if refusal is not None:
                await error_response(refusal)(scope, receive, send_with_id)
            else:
                await self._app({**scope, "state": {**scope.get("state", {}), "request_id": own_id}}, receive, send_with_id)
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.monotonic() - started)

    def _refusal(self, path: str, headers: Headers) -> ErrorCode | None:
        if self._token is None:
            hosts, origins = headers.getlist("host"), headers.getlist("origin")
            is_own = is_from_own_host(hosts, origins, lambda host: host in self._hosts or is_loopback(host))
            return None if is_own else "wrong_host"
        if path in _PUBLIC_PATHS:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        # In constant time, so that the time to refuse says nothing about the token.
        is_equal = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token)
        return None if kind.lower() == "bearer" and is_equal else "unauthorized"


def build_app(
    service: Service, *, token: str | None, single_score: SingleScore | None, hosts: Collection[str] = ()
) -> RequestMiddleware:
    """Build the application. ``token``: the token that clients must send. ``single_score``: the columns of ``POST /score``; None
    disables it.

    ``hosts``: host names under which clients without a token may reach the server, in addition to loopback addresses.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = FastAPI(
        title="Retouch reward server", version=version("retouch"), lifespan=lifespan, redoc_url=None, redirect_slashes=False
    )
    batch, binary = BatchDocument.model_json_schema(), {"type": "string", "format": "binary"}
    texts = {"type": "array", "items": {"type": "string", "format": "byte"}}
    batch_bodies = _request_body(
        {
            "multipart/form-data": {"properties": {"batch": batch, "picture-0": binary}, "required": ["batch"]},
            "application/msgpack": {"properties": {"batch": binary, "pictures": {"type": "array", "items": binary}}},
            "application/json": {"properties": {"batch": batch, "pictures": texts}, "required": ["batch", "pictures"]},
        }
    )
    single_body = _request_body({"application/json": SingleScoreRequest.model_json_schema()})

    @app.post("/v1/score", response_model=ScoreReply, openapi_extra=batch_bodies)
    async def score(request: Request) -> Response:
        with service.admit() as admission:
            seconds = read_deadline(request, longest=service.limits.deadline_seconds)
            kind = request.headers.get("content-type", "")
            result = await service.score(await admission.receive(request), kind, seconds=seconds, admission=admission)
            # If no item can be read, the request as a whole is the caller's error.
            status = 422 if all(set(item.errors.values()) == {"bad_picture"} for item in result.items) else 200
            return JSONResponse(asdict(result), status)

    @app.post("/score", response_model=SingleScoreReply, openapi_extra=single_body)
    async def single(request: Request) -> Response:
        if single_score is None:
            raise RequestError("not_configured")
        with service.admit() as admission:
            seconds = read_deadline(request, longest=service.limits.deadline_seconds)
            needs_text = any(getattr(each.reward, "reads_text", False) for each in service.hosted)
            decode = partial(decode_single_score, needs_text=needs_text)
            sample = await service.decode(decode, await admission.receive(request), admission=admission)
            names = [each.name for each in service.hosted]
            results = await service.score_samples([sample], names, seconds=seconds, admission=admission)
            scores: dict[str, float | None] = {}
            for result in results.values():
                (row,) = result.rows
                if not isinstance(row, str):
                    scores |= row
            return JSONResponse(single_score.numbers(scores))

    @app.get("/v1/info", response_model=ServerInfo)
    async def info() -> ServerInfo:
        return service.info()

    @app.get("/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "stuck" if service.stuck else "alive"}, 503 if service.stuck else 200)

    @app.get("/readyz")
    async def readyz() -> Response:
        return JSONResponse({"status": "ready" if service.ready else "not ready"}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        return error_response(error.code, retry_after=RETRY_SECONDS if error.status in (429, 503) else None)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return error_response({404: "not_found", 405: "bad_method"}.get(error.status_code, "bad_body"))

    # Starlette raises the error again after the reply, and uvicorn logs its traceback.
    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        _LOG.error("request %s to %s failed: %s", request.state.request_id, request.url.path, type(error).__name__)
        return error_response("internal")

    return RequestMiddleware(app, token=token, hosts=hosts, metrics=service.metrics)


def _request_body(schemas: dict[str, dict[str, object]]) -> dict[str, object]:
    content = {kind: {"schema": {"type": "object", **schema}} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}
