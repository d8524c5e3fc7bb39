"""The errors of requests, and which hosts a request may come from.

All errors of a reward server, each with its code, HTTP status and message.

Messages are constants. They contain no part of the request and no message of a library, so they reveal nothing about the server or
about other callers.

Recognise the addresses of this machine, and requests that were sent by web pages of other origins.

A web page of another origin can send requests to a server on its visitor's machine; with DNS rebinding, it can do so under its own
host name. ``is_from_own_host`` detects both.
"""

import ipaddress
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args
from urllib.parse import urlsplit

ErrorCode: TypeAlias = Literal[
    "bad_request",
    "headers_too_large",
    "wrong_host",
    "bad_body",
    "bad_batch",
    "no_text",
    "unsupported",
    "too_large",
    "too_many",
    "too_slow",
    "unauthorized",
    "not_found",
    "bad_method",
    "bad_deadline",
    "not_configured",
    "busy",
    "draining",
    "stalled",
    "deadline",
    "internal",
    "bad_picture",
    "reward_failed",
    "reward_disagrees",
]

ERRORS: dict[ErrorCode, tuple[int, str]] = {
    "bad_request": (400, "this is not a valid HTTP request"),
    "headers_too_large": (431, "the headers are larger or more numerous than this server accepts"),
    "wrong_host": (421, "this server answers only to its own addresses; name others with --allow-host"),
    "bad_body": (400, "the body does not have the format of its content type"),
    "bad_batch": (422, "the batch does not follow the schema in /openapi.json"),
    "no_text": (422, "OCR needs the text that the image should show: send `text`, or put it in quotation marks in the prompt"),
    "unsupported": (415, "send multipart/form-data, application/msgpack or application/json, without a content encoding"),
    "too_large": (413, "the body is larger than /v1/info allows; send fewer or smaller images per request"),
    "too_many": (413, "more items or images than /v1/info allows; send fewer per request"),
    "too_slow": (408, "the request did not arrive in time; send it again"),
    "unauthorized": (401, "this server needs its token: Authorization: Bearer TOKEN"),
    "not_found": (404, "no such page; see /openapi.json"),
    "bad_method": (405, "this page needs another HTTP method; see /openapi.json"),
    "bad_deadline": (400, "X-Deadline-Seconds must be a number of seconds above 0"),
    "not_configured": (404, "/score is not configured: start the server with --vlm COLUMN"),
    "busy": (429, "the queue is full; try again after Retry-After seconds"),
    "draining": (503, "this server is shutting down; use another one"),
    "stalled": (503, "the reward has not answered within a request's deadline; use another server"),
    "deadline": (504, "the deadline passed before the scores were ready"),
    "internal": (500, "the server failed; see its log under this request id"),
    "bad_picture": (
        422,
        "an image is not a PNG, JPEG or WebP of one frame, not raw pixels of its size, or larger than /v1/info allows",
    ),
    "reward_failed": (500, "the reward failed on this item; see the server's log"),
    "reward_disagrees": (500, "the reward returned other columns than it declares, or a value outside a declared range"),
}
assert set(ERRORS) == set(get_args(ErrorCode))


class RequestError(ValueError):
    """The reason why a request, or one item of it, is not scored. ``status``: the HTTP status. ``text``: the message."""

    def __init__(self, code: ErrorCode) -> None:
        self.code = code
        self.status, self.text = ERRORS[code]
        super().__init__(self.text)


def is_loopback(host: str) -> bool:
    """Whether a server at this address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_from_own_host(hosts: Sequence[str], origins: Sequence[str], accepts: Callable[[str], bool]) -> bool:
    """Whether a request has exactly one ``Host`` header and at most one ``Origin`` header, all with accepted host names.

    ``accepts``: returns whether a host name, without its port, is accepted.
    """
    if len(hosts) != 1 or len(origins) > 1:
        return False
    return all(_has_host(url, accepts) for url in (f"http://{hosts[0]}", *origins))


def _has_host(url: str, accepts: Callable[[str], bool]) -> bool:
    try:
        return accepts(urlsplit(url).hostname or "")
    except ValueError:
        return False
