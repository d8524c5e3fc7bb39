"""The read-only endpoints of ``retouch view``: the page, and the files of runs as JSON and images. Other modules define the
endpoints that write.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from retouch.records.files import jsonable
from retouch_serve.front.bodies import Bodies
from retouch_serve.front.connections import FrontLimits
from retouch_view.live.bodies import integer, refused
from retouch_view.live.catalogue import Catalogue
from retouch_view.live.control import control_routes
from retouch_view.live.gate import Gate
from retouch_view.live.judged import judged_routes
from retouch_view.live.live_run import LiveRun
from retouch_view.live.thumbnails import Thumbnails
from retouch_view.live.trying import TrialWorker, try_routes
from retouch_view.live.voting import voting_routes

LIMITS = FrontLimits(max_memory_bytes=2**28)
POLL_SECONDS = 1.0
_MOST_SAMPLES = 500
_KEPT = {"Cache-Control": "private, max-age=60"}
_FRESH = {"Cache-Control": "no-store"}


def build_app(
    root: Path,
    *,
    token: str,
    hosts: Collection[str] = (),
    vote: bool = False,
    control: bool = False,
    trying: str | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> Starlette:
    """Build the application for the runs in ``root``.

    ``vote``: enable votes on pairs of images. ``control``: enable requests to runs that are training. Without both, no file is
    written. ``trying``: enable tries of checkpoints on this device; "auto" is the device of the recipe, or the CPU while the run
    trains. ``poll_seconds``: how often new lines are sent to an open page.
    """
    catalogue, thumbnails = Catalogue(root), Thumbnails()
    bench = None if trying is None else TrialWorker(None if trying == "auto" else trying)

    async def page(request: Request) -> Response:
        with as_file(files("retouch_view.live") / "static" / "index.html") as path:
            return Response(path.read_bytes(), media_type="text/html", headers=_FRESH)

    async def features(request: Request) -> Response:
        return _json({"vote": vote, "control": control, "try": bench is not None})

    async def runs(request: Request) -> Response:
        found = await run_in_threadpool(lambda: [run.overview() for run in catalogue.runs().values()])
        return _json({"folder": str(catalogue.root), "runs": found})

    async def run_details(request: Request) -> Response:
        run = await run_in_threadpool(catalogue.run, request.path_params["name"])
        return _missing("run") if run is None else _json(await run_in_threadpool(run.details))

    async def events(request: Request) -> Response:
        run = await run_in_threadpool(catalogue.run, request.path_params["name"])
        if run is None:
            return _missing("run")
        counts = [integer(request, name) for name in ("generation", "metrics", "timings")]
        return StreamingResponse(_follow(request, run, counts, poll_seconds), media_type="text/event-stream", headers=_FRESH)

    async def samples(request: Request) -> Response:
        run = await run_in_threadpool(catalogue.run, request.path_params["name"])
        if run is None:
            return _missing("run")
        step = integer(request, "step", -1)
        chosen = await run_in_threadpool(lambda: _select(run.samples(None if step < 0 else step), request.query_params))
        start = integer(request, "offset")
        end = start + min(integer(request, "limit", 100), _MOST_SAMPLES)
        return _json({"total": len(chosen), "samples": chosen[start:end]})

    async def image(request: Request) -> Response:
        path = await run_in_threadpool(catalogue.image, *_place(request))
        return _missing("image") if path is None else FileResponse(path, media_type="image/png", headers=_KEPT)

    async def thumbnail(request: Request) -> Response:
        path = await run_in_threadpool(catalogue.image, *_place(request))
        made = None if path is None else await run_in_threadpool(thumbnails.get, path)
        return _missing("image") if made is None else Response(made, media_type="image/png", headers=_KEPT)

    @asynccontextmanager
    async def reading_ahead(app: Starlette) -> AsyncIterator[None]:
        """Read all runs at the start of the server, so that the first page only has to read what was appended since."""
        task = asyncio.create_task(run_in_threadpool(lambda: [run.overview() for run in catalogue.runs().values()]))
        yield
        await task
        if bench is not None:
            await bench.stop()

    routes = [
        Route("/", page),
        Route("/api/features", features),
        Route("/api/runs", runs),
        Route("/api/runs/{name}", run_details),
        Route("/api/runs/{name}/events", events),
        Route("/api/runs/{name}/samples", samples),
        Route("/images/{name}/{step:int}/{file}", image),
        Route("/thumbnails/{name}/{step:int}/{file}", thumbnail),
        Mount("/static", StaticFiles(packages=[("retouch_view.live", "static")])),
    ]
    routes = [*judged_routes(catalogue), *routes]
    routes = [*voting_routes(catalogue, writes=vote), *routes]
    if control:
        routes = [*control_routes(catalogue), *routes]
    if bench is not None:
        routes = [*try_routes(catalogue, bench), *routes]
    # A run with damaged files, or a request that does not fit it: the only place that catches the errors of reading one run.
    handlers: Any = dict.fromkeys((OSError, ValueError), lambda _, error: refused(error))
    gate = Middleware(Gate, token=token, hosts=hosts, writes=vote or control or bench is not None)
    app = Starlette(routes=routes, lifespan=reading_ahead, middleware=[gate], exception_handlers=handlers)
    app.state.bodies = Bodies(LIMITS)
    return app


async def _follow(request: Request, run: LiveRun, counts: list[int], poll_seconds: float) -> AsyncIterator[str]:
    """Yield server-sent events with the new lines, or a comment if there are no new lines. Ends if the run cannot be read."""
    generation, metrics, timings = counts
    last: Mapping[str, Any] | None = None
    while not await request.is_disconnected():
        try:
            found = await run_in_threadpool(run.since, generation, metrics, timings)
        except (OSError, ValueError):
            return
        if found["generation"] != generation:
            metrics = timings = 0
        generation = found["generation"]
        metrics += len(found["metrics"])
        timings += len(found["timings"])
        if found["metrics"] or found["timings"] or found["run"] != last:
            yield f"data: {json.dumps(jsonable(found), separators=(',', ':'))}\n\n"
        else:
            yield ": nothing new\n\n"
        last = found["run"]
        await asyncio.sleep(poll_seconds)


def _select(samples: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Filter the samples by ``set``, ``task`` and ``search`` text, and sort them by the ``sort`` column (``COLUMN`` or
    ``COLUMN:desc``). Samples without that score come last."""
    found = list(samples)
    for name in ("set", "task"):
        if query.get(name):
            found = [line for line in found if line[name] == query[name]]
    if query.get("search"):
        text = query["search"].casefold()
        found = [line for line in found if text in f"{line['instruction']}\n{line.get('text', '')}\n{line['task']}".casefold()]
    column, _, direction = query.get("sort", "").partition(":")
    if column:
        known = [(line, value) for line in found if (value := _score(line, column)) is not None]
        known.sort(key=lambda pair: pair[1], reverse=direction == "desc")
        missing = [line for line in found if _score(line, column) is None]
        found = [*(line for line, _ in known), *missing]
    return found


def _score(line: Mapping[str, Any], column: str) -> float | None:
    value = line.get(column) if column in ("step", "reward", "advantage") else line["scores"].get(column)
    return float(value) if isinstance(value, int | float) else None


def _place(request: Request) -> tuple[str, int, str]:
    given = request.path_params
    return given["name"], given["step"], given["file"]


def _json(value: Mapping[str, Any]) -> Response:
    content = json.dumps(jsonable(value), separators=(",", ":")).encode()
    return Response(content, media_type="application/json", headers=_FRESH)


def _missing(what: str) -> Response:
    return JSONResponse({"error": f"there is no such {what}"}, 404)
