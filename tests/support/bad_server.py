"""A reward server with a chosen fault, which computes correct scores and then breaks the reply, and tables of wrong answers."""

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import loopback
from live_server import host
from retouch.types import Sample
from retouch_serve.requests import Limits, decode
from retouch_serve.wire import ServerInfo
from served_rewards import Digest, digest_score

Reply = dict[str, Any]
Info = dict[str, Any]
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
    "hang", "slow drip", "reset", "close at once", "close mid-body", "truncated JSON", "HTML",
    "JSON with the content type text/plain", "gzip", "huge body", "no UTF-8", "deep JSON", "not HTTP", "empty body", "pickle",
)  # fmt: skip
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
                self.reset()
            case "close at once":
                pass
            case "close mid-body":
                self.reply(200, text, cut=True)
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


def _info(change: Callable[[Info, Info], object]) -> Callable[[], bytes]:
    """Return a function that makes the description after ``change(description, its first reward)``."""

    def make_bytes() -> bytes:
        whole = json.loads(true_info())
        returned = change(whole, whole["rewards"][0])
        return json.dumps(whole if returned is None else returned).encode()

    return make_bytes


def _column(**changes: object) -> Callable[[], bytes]:
    return _info(lambda whole, reward: reward["columns"]["digest"].update(changes))


def _limits(**changes: object) -> Callable[[], bytes]:
    return _info(lambda whole, reward: whole["limits"].update(changes))


def _raw(old: bytes, new: bytes) -> Callable[[], bytes]:
    def make_bytes() -> bytes:
        text = true_info()
        assert old in text
        return text.replace(old, new, 1)

    return make_bytes


WRONG_INFOS: dict[str, Callable[[], bytes]] = {
    "a range to infinity": _column(high=float("inf")),
    "a range from minus infinity": _column(low=float("-inf")),
    "a range to 1e999": _raw(b'"high":1.0', b'"high":1e999'),
    "a range to 1e308": _column(high=1e308),
    "a range to 1e39, infinite in float32": _column(high=1e39),
    "a range to 2e9": _column(high=2e9),
    "a range from -1e308": _column(low=-1e308),
    "a range from NaN": _column(low=float("nan")),
    "a range whose low is above its high": _column(low=2.0, high=1.0),
    "a range of strings": _column(low="0", high="1"),
    "a range of a boolean": _column(high=True),
    "a range of null": _column(high=None),
    "a range of a list": _column(high=[1.0]),
    "a range of 400 digits": _raw(b'"high":1.0', b'"high":1' + b"0" * 400),
    "a diagnostic that is a number": _column(diagnostic=1),
    "max_items of -1": _limits(max_items=-1),
    "max_items of 0": _limits(max_items=0),
    "max_items of infinity": _limits(max_items=float("inf")),
    "max_items of 1e400": _raw(b'"max_items":256', b'"max_items":1e400'),
    "max_items of 0.5": _limits(max_items=0.5),
    "max_items that is a string": _limits(max_items="8"),
    "max_items of 2^70": _limits(max_items=2**70),
    "max_body_bytes of -1": _limits(max_body_bytes=-1),
    "max_pixels of 0": _limits(max_pixels=0),
    "no limits": _info(lambda whole, reward: whole.pop("limits") and None),
    "limits that are null": _info(lambda whole, reward: whole.update(limits=None)),
    "another service": _info(lambda whole, reward: whole.update(service="another")),
    "a service that is empty": _info(lambda whole, reward: whole.update(service="")),
    "a service that is a number": _info(lambda whole, reward: whole.update(service=1)),
    "no service": _info(lambda whole, reward: whole.pop("service") and None),
    "no rewards": _info(lambda whole, reward: whole.update(rewards=[])),
    "the same reward twice": _info(lambda whole, reward: whole["rewards"].append(copy.deepcopy(reward))),
    "two rewards with one column": _info(lambda whole, reward: whole["rewards"].append({**copy.deepcopy(reward), "name": "b"})),
    "a thousand rewards": _info(
        lambda whole, reward: whole["rewards"].extend(
            {**reward, "name": f"r{k}", "columns": {f"c{k}": {"low": 0, "high": 1}}} for k in range(1000)
        )
    ),
    "a reward without columns": _info(lambda whole, reward: reward.update(columns={})),
    "ten thousand columns": _info(
        lambda whole, reward: reward.update(columns={f"c{k}": {"low": 0.0, "high": 1.0} for k in range(10_000)})
    ),
    "columns that are a list": _info(lambda whole, reward: reward.update(columns=["digest"])),
    "a column without a name": _info(lambda whole, reward: reward["columns"].update({"": {"low": 0.0, "high": 1.0}})),
    "a column with a long name": _info(lambda whole, reward: reward["columns"].update({"a" * 300: {"low": 0.0, "high": 1.0}})),
    "a reward's name that is a path": _info(lambda whole, reward: reward.update(name="../../etc")),
    "a reward's name of 100 letters": _info(lambda whole, reward: reward.update(name="a" * 100)),
    "a fingerprint of 1 MB": _info(lambda whole, reward: reward.update(fingerprint="a" * 500_000)),
    "a fingerprint that is empty": _info(lambda whole, reward: reward.update(fingerprint="")),
    "a fingerprint that is null": _info(lambda whole, reward: reward.update(fingerprint=None)),
    "a kind of 10 000 letters": _info(lambda whole, reward: reward.update(kind="a" * 10_000)),
    "a version of 10 000 letters": _info(lambda whole, reward: whole.update(version="9" * 10_000)),
    "a list": _info(lambda whole, reward: [whole]),
    "a text": _info(lambda whole, reward: "retouch"),
    "nothing": lambda: b"",
    "lists 100 000 deep": lambda: b"[" * 100_000,
    "2 MB": lambda: true_info() + b" " * 2**21,
    "no UTF-8": lambda: true_info().replace(b"retouch", b"retou\xff"),
    "UTF-16": lambda: true_info().decode().encode("utf-16"),
}
"""Descriptions that a client must reject before it sends a sample."""


def _reply(change: Callable[[Reply], object]) -> Callable[[Reply], bytes]:
    def make_bytes(reply: Reply) -> bytes:
        returned = change(reply)
        return json.dumps(reply if returned is None else returned).encode()

    return make_bytes


def _scores(*texts: str) -> dict[str, Callable[[Reply], bytes]]:
    """Return functions that replace the first score by one of these texts in the JSON."""

    def with_text(text: str, reply: Reply) -> bytes:
        return json.dumps(with_first_score(reply, "HERE")).replace('"HERE"', text).encode()

    return {f"a score of {text}": partial(with_text, text) for text in texts}


def _twice(key: str, again: str) -> Callable[[Reply], bytes]:
    """Return a function that inserts the key with another value before its first occurrence."""
    return lambda reply: json.dumps(reply).replace(f'"{key}":', f'"{key}": {again}, "{key}":', 1).encode()


WRONG_REPLIES: dict[str, Callable[[Reply], bytes]] = {
    **_scores("1e300", "-1e300", "1e999", "-1e999", "1e39", "1.0000001", "-0.0000001", "2"),
    **_scores("Infinity", "-Infinity", "NaN", "nan", "1" + "0" * 400, "9" * 5000, "0x1", "01"),
    **_scores(".5", "5.", "+0.5", "1e", "0,5", "½", "'0.5'", "undefined", "True", "[]", "{}"),
    **_scores("false", "true", '""', '"NaN"', '"0.5"', "[0.5]", '{"value": 0.5}', "1e-400e1"),
    "the scores twice": _twice("scores", '{"digest": 0.9, "odd": null}'),
    "the items twice": _twice("items", "[]"),
    "the judges twice": _twice("judges", '{"digest": ["other"]}'),
    "the id twice": _twice("id", '"another"'),
    "a score twice": _twice("digest", '["fingerprint-digest"]'),
    "errors that are a list": _reply(lambda reply: reply["items"][0].update(errors=["digest"])),
    "errors that are null": _reply(lambda reply: reply["items"][0].update(errors=None)),
    "errors that are a text": _reply(lambda reply: reply["items"][0].update(errors="digest")),
    "no scores": _reply(lambda reply: reply["items"][0].pop("scores") and None),
    "scores that are null": _reply(lambda reply: reply["items"][0].update(scores=None)),
    "scores that are a text": _reply(lambda reply: reply["items"][0].update(scores="digest")),
    "an empty column": _reply(lambda reply: reply["items"][0]["scores"].update({"": 0.5})),
    "a column with a space": _reply(lambda reply: reply["items"][0]["scores"].update({"digest ": 0.5})),
    "an id that is null": _reply(lambda reply: reply["items"][0].update(id=None)),
    "an id that is a list": _reply(lambda reply: reply["items"][0].update(id=[])),
    "an id with a space": _reply(lambda reply: reply["items"][0].update(id=reply["items"][0]["id"] + " ")),
    "an id in capitals": _reply(lambda reply: reply["items"][0].update(id=reply["items"][0]["id"].upper() + "X")),
    "an item that is null": _reply(lambda reply: reply["items"].__setitem__(0, None)),
    "an item that is a list": _reply(lambda reply: reply["items"].__setitem__(0, [])),
    "an item that is a text": _reply(lambda reply: reply["items"].__setitem__(0, "x")),
    "items that are an object": _reply(lambda reply: {**reply, "items": {"0": reply["items"][0]}}),
    "items that are null": _reply(lambda reply: {**reply, "items": None}),
    "items that are a text": _reply(lambda reply: {**reply, "items": "x" * len(reply["items"])}),
    "no judges": _reply(lambda reply: {"items": reply["items"]}),
    "judges that are null": _reply(lambda reply: {**reply, "judges": None}),
    "judges that are a list": _reply(lambda reply: {**reply, "judges": ["fingerprint-digest"]}),
    "a judge that is a text": _reply(lambda reply: {**reply, "judges": {"digest": "fingerprint-digest"}}),
    "an additional judge": _reply(lambda reply: {**reply, "judges": {**reply["judges"], "other": ["x"]}}),
    "a judge without a fingerprint": _reply(lambda reply: {**reply, "judges": {"digest": []}}),
    "the same judge twice": _reply(lambda reply: {**reply, "judges": {"digest": ["fingerprint-digest"] * 2}}),
    "a fingerprint in capitals": _reply(lambda reply: {**reply, "judges": {"digest": ["FINGERPRINT-DIGEST"]}}),
    "two documents": lambda reply: json.dumps(reply).encode() * 2,
    "a document and a word": lambda reply: json.dumps(reply).encode() + b" x",
    "a byte order mark": lambda reply: b"\xef\xbb\xbf" + json.dumps(reply).encode(),
    "UTF-16": lambda reply: json.dumps(reply).encode("utf-16"),
    "UTF-32": lambda reply: json.dumps(reply).encode("utf-32"),
    "a comment": lambda reply: b"// scores\n" + json.dumps(reply).encode(),
    "single quotes": lambda reply: str(reply).encode(),
    "a trailing comma": lambda reply: json.dumps(reply).encode()[:-1] + b",}",
    "a null byte": lambda reply: json.dumps(reply).encode() + b"\0",
    "a number alone": lambda reply: b"0.5",
    "a text alone": lambda reply: b'"ok"',
    "an empty object": lambda reply: b"{}",
    "objects 50 000 deep": lambda reply: b'{"items":' * 50_000,
    "a million lists": lambda reply: b'{"items": [' + b"[]," * 1_000_000 + b"[]]}",
    "a million additional objects": _reply(lambda reply: {**reply, "more": [{}] * 1_000_000}),
    "a million keys": lambda reply: b"{" + b",".join(b'"%d":0' % k for k in range(1_000_000)) + b"}",
    "ten thousand items": _reply(lambda reply: {**reply, "items": reply["items"] * 10_000}),
}
"""Replies that a client must reject as a whole."""
