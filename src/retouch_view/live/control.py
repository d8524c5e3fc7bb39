"""The endpoint of ``retouch view --control``, which records a request to a run that is training."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retouch.records.control import make_request
from retouch_view.live.bodies import read_object, refused
from retouch_view.live.catalogue import Catalogue

_MOST_BYTES = 10_000


def control_routes(catalogue: Catalogue) -> list[Route]:
    """``POST /api/runs/NAME/control`` with ``{"action": ..., "value": ...}``, the arguments of ``records.control.make_request``."""

    async def control(request: Request) -> Response:
        run = await run_in_threadpool(catalogue.run, request.path_params["name"])
        if run is None:
            return JSONResponse({"error": "there is no such run"}, 404)
        try:
            asked = await read_object(request, max_bytes=_MOST_BYTES)
            made = await run_in_threadpool(make_request, run.folder, asked.get("action"), asked.get("value"), via="page")
        except ValueError as error:
            return refused(error)
        except OSError as error:
            return JSONResponse({"error": f"the request could not be written: {error.strerror}"}, 409)
        return JSONResponse({"id": made}, 202)

    return [Route("/api/runs/{name}/control", control, methods=["POST"])]
