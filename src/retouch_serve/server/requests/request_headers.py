"""Reads the headers of a request."""

import math
import re
import secrets

from starlette.requests import Request

from retouch_serve.wire.errors import RequestError

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def read_deadline(request: Request, *, longest: float) -> float:
    """Return the time in seconds until the request's deadline: ``X-Deadline-Seconds``, at most ``longest``, which is also the
    default. Raises RequestError if the header is not a positive number."""
    stated = request.headers.get("x-deadline-seconds")
    if stated is None:
        return longest
    try:
        seconds = float(stated)
    except ValueError:
        raise RequestError("bad_deadline") from None
    if not math.isfinite(seconds) or seconds <= 0:
        raise RequestError("bad_deadline")
    return min(seconds, longest)


def request_id(stated: str | None) -> str:
    """Return the caller's id if it has 1 to 128 printable ASCII characters without spaces, otherwise a new id."""
    return stated if stated is not None and _REQUEST_ID.fullmatch(stated) else secrets.token_hex(8)
