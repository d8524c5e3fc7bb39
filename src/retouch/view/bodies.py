"""Reads the input of a request: numbers in the query string, and a JSON body of limited size and duration."""

import asyncio
import json
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

SECONDS = 30.0


class BadRequest(Exception):
    """A request body that cannot be used. ``status``: the HTTP status of the reply."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    def reply(self) -> JSONResponse:
        """Return the reply to the page, with the message of this error."""
        return JSONResponse({"error": str(self)}, self.status)


def integer(request: Request, name: str, default: int = 0) -> int:
    """Return a number of at most nine digits from the query string; ``default`` if there is none."""
    given = request.query_params.get(name, "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 10 else default


async def read_object(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the body. Raises BadRequest if it is no object, exceeds ``max_bytes``, or arrives too slowly."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise BadRequest(413, f"the request has more than {max_bytes} bytes")
                parts.append(part)
        found = json.loads(b"".join(parts))
    except TimeoutError:
        raise BadRequest(408, f"the request did not arrive within {SECONDS:.0f} seconds") from None
    except ClientDisconnect:
        raise BadRequest(400, "the connection was closed") from None
    except (ValueError, RecursionError):
        raise BadRequest(400, "the request is not JSON") from None
    if not isinstance(found, dict):
        raise BadRequest(400, "the request is not a JSON object")
    return found
