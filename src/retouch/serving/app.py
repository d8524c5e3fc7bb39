"""The pages of a reward server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from retouch import __version__
from retouch.rewards.wire.errors import RequestError
from retouch.rewards.wire.schema import BatchDocument, ServerInfo
from retouch.serving.compat import Compat, Numbers, Single, decode_single
from retouch.serving.gate import Gate, refusal
from retouch.serving.reception import read_body, read_deadline
from retouch.serving.service import Service

_LOG = logging.getLogger("retouch.serving")
RETRY_SECONDS = 1
_BINARY = {"type": "string", "format": "binary"}


class ItemReply(BaseModel):
    """One item's columns (null: could not be judged), and for each reward that failed on it a code."""

    id: str
    scores: dict[str, float | None]
    errors: dict[str, str]


class ScoreReply(BaseModel):
    """``judges``: the fingerprint of each reward asked; two where it was swapped while the request was in hand."""

    judges: dict[str, list[str]]
    items: list[ItemReply]


def build_app(service: Service, *, token: str | None, compat: Compat | None) -> Gate:
    """The application: FastAPI's, behind the gate."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = FastAPI(title="Retouch reward server", version=__version__, lifespan=life, redoc_url=None, redirect_slashes=False)
    _score_pages(app, service, compat)
    _state_pages(app, service)
    _errors(app)
    return Gate(app, token=token, metrics=service.metrics)


def _score_pages(app: FastAPI, service: Service, compat: Compat | None) -> None:
    @app.post("/v1/score", response_model=ScoreReply, openapi_extra=_batch_schema())
    async def score(request: Request) -> Response:
        with service.admit() as admission:
            seconds = read_deadline(request, longest=service.limits.deadline_seconds)
            body = await _body(request, service)
            results = await service.score(body, request.headers.get("content-type", ""), seconds=seconds, admission=admission)
            failed = [set(item.errors.values()) for item in results.items]
            # A request of which nothing at all could be read is the caller's mistake as a whole.
            status = 422 if all(codes == {"bad_picture"} for codes in failed) else 200
            return JSONResponse({"judges": results.judges, "items": [asdict(item) for item in results.items]}, status)

    @app.post("/score", response_model=Numbers, openapi_extra=_single_schema())
    async def single(request: Request) -> Response:
        if compat is None:
            raise RequestError("not_configured")
        with service.admit() as admission:
            seconds = read_deadline(request, longest=service.limits.deadline_seconds)
            body = await _body(request, service)
            sample = await asyncio.to_thread(decode_single, body, service.limits)
            names = [each.name for each in service.hosted]
            verdicts = await service.judge([sample], names, seconds=seconds, admission=admission)
            scores: dict[str, float | None] = {}
            for given in verdicts.values():
                (verdict,) = given.rows
                if not isinstance(verdict, str):
                    scores |= verdict
            return JSONResponse(compat.numbers(scores))


def _state_pages(app: FastAPI, service: Service) -> None:
    @app.get("/v1/info", response_model=ServerInfo)
    async def info() -> ServerInfo:
        return service.info()

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz() -> Response:
        return JSONResponse({"status": "ready" if service.ready else "not ready"}, 200 if service.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _errors(app: FastAPI) -> None:
    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return refusal(error.code, retry_after=RETRY_SECONDS if error.status in (429, 503) else None)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        return refusal({404: "not_found", 405: "bad_method"}.get(error.status_code, "bad_body"))  # type: ignore[arg-type]

    # The error goes on to uvicorn, which logs its traceback.
    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        _LOG.error("request %s to %s failed: %s", request.state.request_id, request.url.path, type(error).__name__)
        return refusal("internal")


async def _body(request: Request, service: Service) -> bytes:
    return await read_body(request, max_bytes=service.limits.max_body_bytes, seconds=service.limits.body_seconds)


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
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": Single.model_json_schema()}}}}
