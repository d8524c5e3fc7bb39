"""Reads the body and the headers of a request. A body never takes more memory than the limit allows."""

import asyncio
import math
import re
import secrets
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request

from retouch.rewards.wire.errors import RequestError

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def read_body(request: Request, *, max_bytes: int, seconds: float, hold: Callable[[int], None]) -> bytes:
    """Read the body. ``hold``: called with the number of bytes of each part that arrives, before it is kept.

    Raises RequestError if the body is compressed, is larger than ``max_bytes``, or takes longer than ``seconds`` to arrive, or if
    ``hold`` raises it.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise RequestError("unsupported")
    stated = request.headers.get("content-length", "0")
    if not stated.isascii() or not stated.isdigit() or len(stated) > 18:
        raise RequestError("bad_body")
    if int(stated) > max_bytes:
        raise RequestError("too_large")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise RequestError("too_large")
                hold(len(part))
                parts.append(part)
    except TimeoutError:
        raise RequestError("too_slow") from None
    except ClientDisconnect:
        raise RequestError("bad_body") from None
    return b"".join(parts)


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
