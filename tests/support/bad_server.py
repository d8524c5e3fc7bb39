"""A reward server with a chosen fault: it computes the correct scores and then changes or breaks the reply."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import loopback
from live_server import host
from retouch.types import Sample
from retouch_serve.requests import Limits, decode
from retouch_serve.wire import ServerInfo
from served_rewards import Digest, digest_score

Reply = dict[str, Any]
FaultKind = str | Callable[[Reply], bytes]
INFO = ServerInfo(service="retouch", version="0", rewards=[host(Digest()).info()], limits=Limits().info())


def true_info() -> bytes:
    return INFO.model_dump_json().encode()


def true_reply(body: bytes, kind: str) -> Reply:
    decoded = decode(body, kind, Limits())
    samples = [sample for sample in decoded.samples if isinstance(sample, Sample)]
    items = [
        {"id": name, "scores": {"digest": digest_score(sample), "odd": None}, "errors": {}}
        for name, sample in zip(decoded.ids, samples, strict=True)
    ]
    return {"judges": {"digest": ["fingerprint-digest"]}, "items": items}


def with_first_score(reply: Reply, value: object) -> Reply:
    reply["items"][0]["scores"]["digest"] = value
    return reply


def item(reply: Reply, **changes: object) -> Reply:
    reply["items"][-1] |= changes
    return reply


def with_unknown_id(reply: Reply) -> Reply:
    first, last = reply["items"][0], reply["items"][-1]
    first["id"] = last["id"] + "-x"
    return reply


# Changes that make a correct reply wrong.
CHANGES: dict[str, Callable[[Reply], object]] = {
    "no items": lambda reply: {"judges": reply["judges"]},
    "a missing item": lambda reply: {**reply, "items": reply["items"][1:]},
    "an additional item": lambda reply: {**reply, "items": [*reply["items"], {**reply["items"][0], "id": "stranger"}]},
    "an item twice": lambda reply: {**reply, "items": [reply["items"][0], *reply["items"][:-1]]},
    "an unknown id": with_unknown_id,
    "an id that is a number": lambda reply: item(reply, id=7),
    "NaN": lambda reply: with_first_score(reply, float("nan")),
    "infinity": lambda reply: with_first_score(reply, float("inf")),
    "a number above the range": lambda reply: with_first_score(reply, 1.5),
    "a number below the range": lambda reply: with_first_score(reply, -1e-3),
    "a huge whole number": lambda reply: with_first_score(reply, 10**400),
    "a text for a number": lambda reply: with_first_score(reply, "0.5"),
    "true for a number": lambda reply: with_first_score(reply, True),
    "a list for a number": lambda reply: with_first_score(reply, [0.5]),
    "a missing column": lambda reply: item(reply, scores={"odd": None}),
    "another column": lambda reply: item(reply, scores={"digest": 0.5, "odd": None, "even": 1.0}),
    "renamed columns": lambda reply: item(reply, scores={"Digest": 0.5, "odd": None}),
    "a list instead of the scores": lambda reply: item(reply, scores=[0.5, None]),
    "errors of an unknown reward": lambda reply: item(reply, errors={"nobody": "reward_failed"}),
    "scores and an error": lambda reply: item(reply, errors={"digest": "reward_failed"}),
    "an error of the reward": lambda reply: item(reply, scores={}, errors={"digest": "reward_failed"}),
    "another judge": lambda reply: {**reply, "judges": {"digest": ["other"]}},
    "two judges in one reply": lambda reply: {**reply, "judges": {"digest": ["fingerprint-digest", "other"]}},
    "only the list of items": lambda reply: reply["items"],
    "null": lambda reply: None,
}
# Faults of the HTTP response: a status instead of the reply, or a change of its bytes or of the connection.
STATUSES = {"500": 500, "502": 502, "503": 503, "429": 429, "204": 204, "302": 302, "404": 404, "400": 400, "401": 401}
TRANSPORT_FAULTS = (
    *("hang", "slow drip", "reset", "close at once", "close mid-body", "truncated JSON", "HTML"),
    *("JSON with the content type text/plain", "gzip", "huge body", "no UTF-8", "deep JSON", "not HTTP", "empty body"),
    *("pickle",),
)
ALL_FAULTS = (*CHANGES, *STATUSES, *TRANSPORT_FAULTS)
HARMLESS = ("another order",)


class _Handler(loopback.Handler):
    server: "_Server"

    def do_GET(self) -> None:
        if self.path == "/readyz":
            self._answer(200 if self.server.ready() else 503, b"{}")
        else:
            self._answer(200, self.server.info())

    def do_POST(self) -> None:
        body = self.body()
        kind = self.server.kind()
        self.server.request_count += 1
        reply = true_reply(body, self.headers["Content-Type"])
        if callable(kind):
            self._answer(200, kind(reply))
        elif kind in CHANGES:
            self._answer(200, json.dumps(CHANGES[kind](reply)).encode())
        elif kind in STATUSES:
            self._answer(STATUSES[kind], b'{"error": {"code": "x", "message": "y"}}' if kind != "204" else b"")
        elif kind == "another order":
            self._answer(200, json.dumps({**reply, "items": reply["items"][::-1]}).encode())
        elif kind == "none":
            self._answer(200, json.dumps(reply).encode())
        else:
            self._misbehave(kind, json.dumps(reply).encode())

    def _misbehave(self, kind: str, text: bytes) -> None:
        self.close_connection = True
        match kind:
            case "hang":
                self.server.ended.wait(timeout=30)
            case "slow drip":
                self._head(len(text))
                for place in range(len(text)):
                    if self.server.ended.wait(timeout=0.2):
                        return
                    self.wfile.write(text[place : place + 1])
                    self.wfile.flush()
            case "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            case "close at once":
                pass
            case "close mid-body":
                self._head(len(text))
                self.wfile.write(text[: len(text) // 2])
            case "truncated JSON":
                self._answer(200, text[: len(text) // 2])
            case "HTML":
                self._answer(200, b"<html><body>Bad gateway</body></html>", kind="text/html")
            case "JSON with the content type text/plain":
                self._answer(200, text, kind="text/plain")
            case "gzip":
                self._head(len(text), "Content-Encoding: gzip\r\n")
                self.wfile.write(text)
            case "huge body":
                self._answer(200, b'{"items": "' + b"a" * (17 * 2**20) + b'"}')
            case "no UTF-8":
                self._answer(200, text.replace(b"digest", b"dig\xff\xfe"))
            case "deep JSON":
                self._answer(200, b"[" * 100_000)
            case "not HTTP":
                self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
            case "empty body":
                self._answer(200, b"")
            case "pickle":
                self._answer(200, b"\x80\x04K\x01.", kind="application/octet-stream")
            case _:
                raise AssertionError(kind)

    def _head(self, length: int, more: str = "") -> None:
        self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{more}Content-Length: {length}\r\n\r\n".encode())

    def _answer(self, status: int, body: bytes, *, kind: str = "application/json") -> None:
        self.reply(status, body, {"Content-Type": kind, **({"Location": "http://127.0.0.1:9/"} if status == 302 else {})})


class _Server(loopback.Server):
    def __init__(self, kind: Callable[[], FaultKind], info: Callable[[], bytes], ready: Callable[[], bool]) -> None:
        super().__init__(_Handler)
        self.ready = ready
        self.kind, self.info, self.request_count, self.ended = kind, info, 0, threading.Event()


@contextmanager
def bad_server(
    kind: str | Callable[[], FaultKind], *, info: Callable[[], bytes] = true_info, ready: Callable[[], bool] = lambda: True
) -> Iterator[_Server]:
    """Run a server with one kind of fault, or with the kind that ``kind()`` returns for each request; "none": no fault.

    ``kind()`` can also return a function that makes the bytes of the reply from the correct reply. ``info``: returns the server's
    description. ``ready``: returns whether /readyz reports that the server is ready.
    """
    server = _Server((lambda: kind) if isinstance(kind, str) else kind, info, ready)
    with loopback.running(server):
        try:
            yield server
        finally:
            server.ended.set()
