"""The HTTP endpoints of a reward server."""

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from retouch_serve.server.middleware import RequestMiddleware, error_response
from retouch_serve.server.request_bodies import (
    SingleScore,
    SingleScoreReply,
    SingleScoreRequest,
    decode_single_score,
    read_deadline,
)
from retouch_serve.server.service import Service
from retouch_serve.wire.errors import RequestError
from retouch_serve.wire.schema import BatchDocument, ServerInfo

_LOG = logging.getLogger("retouch.serving")
RETRY_SECONDS = 1
_BINARY = {"type": "string", "format": "binary"}


class ItemReply(BaseModel):
    """One item's columns (null: the score is missing), and an error code for each reward that failed on it."""

    id: str
    scores: dict[str, float | None]
    errors: dict[str, str]


class ScoreReply(BaseModel):
    """The reply of ``POST /v1/score``. ``judges``: the fingerprint of each reward; two if it was reloaded during the request."""

    judges: dict[str, list[str]]
    items: list[ItemReply]


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
    _add_scoring(app, service, single_score)
    _add_state(app, service)
    _add_errors(app)
    return RequestMiddleware(app, token=token, hosts=hosts, metrics=service.metrics)


def _add_scoring(app: FastAPI, service: Service, single_score: SingleScore | None) -> None:
    @app.post("/v1/score", response_model=ScoreReply, openapi_extra=_batch_schema())
    async def score(request: Request) -> Response:
        with service.admit() as admission:
            seconds = read_deadline(request, longest=service.limits.deadline_seconds)
            kind = request.headers.get("content-type", "")
            result = await service.score(await admission.receive(request), kind, seconds=seconds, admission=admission)
            failed = [set(item.errors.values()) for item in result.items]
            # If no item can be read, the request as a whole is the caller's error.
            status = 422 if all(codes == {"bad_picture"} for codes in failed) else 200
            return JSONResponse({"judges": result.judges, "items": [asdict(item) for item in result.items]}, status)

    @app.post("/score", response_model=SingleScoreReply, openapi_extra=_single_schema())
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


def _add_state(app: FastAPI, service: Service) -> None:
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
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> Response:
        return error_response(error.code, retry_after=RETRY_SECONDS if error.status in (429, 503) else None)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return error_response({404: "not_found", 405: "bad_method"}.get(error.status_code, "bad_body"))  # type: ignore[arg-type]

    # Starlette raises the error again after the reply, and uvicorn logs its traceback.
    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        _LOG.error("request %s to %s failed: %s", request.state.request_id, request.url.path, type(error).__name__)
        return error_response("internal")


def _batch_schema() -> dict[str, object]:
    batch = BatchDocument.model_json_schema()
    texts = {"type": "array", "items": {"type": "string", "format": "byte"}}
    forms: dict[str, dict[str, object]] = {
        "multipart/form-data": {"properties": {"batch": batch, "picture-0": _BINARY}, "required": ["batch"]},
        "application/msgpack": {"properties": {"batch": _BINARY, "pictures": {"type": "array", "items": _BINARY}}},
        "application/json": {"properties": {"batch": batch, "pictures": texts}, "required": ["batch", "pictures"]},
    }
    content = {kind: {"schema": {"type": "object", **form}} for kind, form in forms.items()}
    return {"requestBody": {"required": True, "content": content}}


def _single_schema() -> dict[str, object]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": SingleScoreRequest.model_json_schema()}}}}
