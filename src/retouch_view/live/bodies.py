"""Reads the input of a request: numbers in the query string, and a JSON body; and replies to invalid input."""

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from retouch_serve.front.bodies import Body
from retouch_serve.wire.errors import RequestError


def refused(error: Exception) -> JSONResponse:
    """Return the reply to input that cannot be used, with the message of the error."""
    return JSONResponse({"error": str(error)}, error.status if isinstance(error, RequestError) else 409)


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
