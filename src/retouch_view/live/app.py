"""The endpoints of ``retouch view``: the page, the files of runs as JSON and images, the answers of judges, and requests to runs.

The endpoints of votes and of tries are in modules of their own.
"""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from retouch.records.control import make_request
from retouch.records.files import jsonable
from retouch.records.folder import RunFolder
from retouch.rewards.ledger.database import decode_scores, open_read_only
from retouch_serve.front import Bodies, FrontLimits
from retouch_view.live.requests import FRESH, Gate, NotFoundError, integer, read_object, refused, run_of
from retouch_view.live.runs import Catalogue, LiveRun, Thumbnails
from retouch_view.live.trying import TrialWorker, try_routes
from retouch_view.live.voting import voting_routes
from retouch_view.report.tables import paired_differences

LIMITS = FrontLimits(max_memory_bytes=2**28)
POLL_SECONDS = 1.0
_MOST_SAMPLES = 500
_MOST_COMPARED = 20
_KEPT = {"Cache-Control": "private, max-age=60"}
_MOST_REQUEST_BYTES = 10_000
_SPLITS = {"group": ("train", 1), "heldout": ("heldout", 0)}  # the ledger counts training steps from 0
_PLACE = "SELECT DISTINCT picture FROM samples WHERE split = ? AND step = ? AND group_id = ? AND slot = ? AND picture != ''"
_ANSWERS = (
    "SELECT CAST(judge AS TEXT) AS judge, CAST(rubric AS TEXT) AS rubric, substr(CAST(text AS TEXT), 1, ?) AS text, "
    "length(text) AS characters, CAST(fault AS TEXT) AS fault, CAST(scores AS TEXT) AS scores, CAST(attempts AS REAL) AS attempts, "
    "CAST(seconds AS REAL) AS seconds, CAST(cost AS REAL) AS cost "
    "FROM answers WHERE picture = ? ORDER BY number LIMIT ?"
)
_MOST_CHARACTERS = 20_000
_MOST_ANSWERS = 20


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

    def overviews() -> list[dict[str, Any]]:
        return [run.overview() for run in catalogue.runs().values()]

    async def page(request: Request) -> Response:
        with as_file(files("retouch_view.live") / "static" / "index.html") as path:
            return Response(path.read_bytes(), media_type="text/html", headers=FRESH)

    async def features(request: Request) -> Response:
        return _json({"vote": vote, "control": control, "try": bench is not None})

    async def runs(request: Request) -> Response:
        return _json({"folder": str(catalogue.root), "runs": await run_in_threadpool(overviews)})

    async def run_details(request: Request) -> Response:
        run = await run_of(request, catalogue)
        return _json(await run_in_threadpool(run.details))

    async def events(request: Request) -> Response:
        run = await run_of(request, catalogue)
        counts = [integer(request, name) for name in ("generation", "metrics", "timings")]
        return StreamingResponse(_follow(request, run, counts, poll_seconds), media_type="text/event-stream", headers=FRESH)

    async def samples(request: Request) -> Response:
        run = await run_of(request, catalogue)
        step = integer(request, "step", -1)
        chosen = await run_in_threadpool(lambda: _select(run.samples(None if step < 0 else step), request.query_params))
        start = integer(request, "offset")
        end = start + min(integer(request, "limit", 100), _MOST_SAMPLES)
        return _json({"total": len(chosen), "samples": chosen[start:end]})

    async def answers(request: Request) -> Response:
        run = await run_of(request, catalogue)
        kind = request.query_params.get("set", "")
        step, group, slot = (integer(request, name) for name in ("step", "group", "slot"))
        found = await run_in_threadpool(_answers, run.folder, kind, step=step, group=group, slot=slot)
        return _json({"answers": found})

    async def compare(request: Request) -> Response:
        found = [await run_in_threadpool(catalogue.run, name) for name in request.query_params.getlist("run")[:_MOST_COMPARED]]
        roots = [run.folder.root for run in found if run is not None]
        try:
            return _json(await run_in_threadpool(paired_differences, roots))
        except ValueError as error:  # the page shows their curves all the same
            return _json({"error": str(error)})

    async def ask_run(request: Request) -> Response:
        run = await run_of(request, catalogue)
        asked = await read_object(request, max_bytes=_MOST_REQUEST_BYTES)
        try:
            made = await run_in_threadpool(make_request, run.folder, asked.get("action"), asked.get("value"), via="page")
        except OSError as error:
            return JSONResponse({"error": f"the request could not be written: {error.strerror}"}, 409)
        return JSONResponse({"id": made}, 202)

    async def image(request: Request) -> Response:
        path = await run_in_threadpool(catalogue.image, **request.path_params)
        if path is None:
            raise NotFoundError("image")
        return FileResponse(path, media_type="image/png", headers=_KEPT)

    async def thumbnail(request: Request) -> Response:
        path = await run_in_threadpool(catalogue.image, **request.path_params)
        made = None if path is None else await run_in_threadpool(thumbnails.get, path)
        if made is None:
            raise NotFoundError("image")
        return Response(made, media_type="image/png", headers=_KEPT)

    @asynccontextmanager
    async def reading_ahead(app: Starlette) -> AsyncIterator[None]:
        """Read all runs at the start of the server, so that the first page only has to read what was appended since."""
        task = asyncio.create_task(run_in_threadpool(overviews))
        yield
        await task
        if bench is not None:
            await bench.stop()

    routes: list[BaseRoute] = [
        Route("/", page),
        Route("/api/features", features),
        Route("/api/runs", runs),
        Route("/api/compare", compare),
        Route("/api/runs/{name}", run_details),
        Route("/api/runs/{name}/events", events),
        Route("/api/runs/{name}/samples", samples),
        Route("/api/runs/{name}/answers", answers),
        Route("/images/{name}/{step:int}/{file}", image),
        Route("/thumbnails/{name}/{step:int}/{file}", thumbnail),
        Mount("/static", StaticFiles(packages=[("retouch_view.live", "static")])),
    ]
    routes += voting_routes(catalogue, writes=vote)
    if control:
        routes.append(Route("/api/runs/{name}/control", ask_run, methods=["POST"]))
    if bench is not None:
        routes += try_routes(catalogue, bench)
    # A run with damaged files, or a request that does not fit it: the only place that catches the errors of reading one run.
    handlers: Any = dict.fromkeys((OSError, ValueError, NotFoundError), lambda _, error: refused(error))
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


def _json(value: Mapping[str, Any]) -> Response:
    content = json.dumps(jsonable(value), separators=(",", ":")).encode()
    return Response(content, media_type="application/json", headers=FRESH)


def _answers(folder: RunFolder, kind: str, *, step: int, group: int, slot: int) -> list[dict[str, Any]]:
    """Return the answers about the image of a stored sample, in the order in which they were given; long texts are cut.

    ``kind``: the ``set`` of the sample, "group" or "heldout"; empty list for another one. Keys of an answer: ``judge``: its name.
    ``rubric``: the fingerprint of the rubric, empty for a reward server. ``fault``: why there is no score, otherwise empty.
    ``scores``: by column, or None. ``cost``: None if no price is known. Raises ValueError if a ledger is damaged.
    """
    if kind not in _SPLITS:
        return []
    split, earlier = _SPLITS[kind]
    found: list[dict[str, Any]] = []
    for path in sorted(folder.root.glob("ledger*.sqlite")):
        if path.is_file() and not path.is_symlink():
            with closing(open_read_only(path, seconds=5.0)) as connection:
                connection.row_factory = sqlite3.Row
                try:
                    for (picture,) in connection.execute(_PLACE, (split, step - earlier, group, slot)).fetchall():
                        for row in connection.execute(_ANSWERS, (_MOST_CHARACTERS, picture, _MOST_ANSWERS)):
                            scores = None if row["scores"] is None else decode_scores(row["scores"])
                            found.append({**dict(row), "scores": scores})
                except sqlite3.Error as error:
                    raise ValueError(f"the ledger cannot be read: {error}") from None
    return found[:_MOST_ANSWERS]
