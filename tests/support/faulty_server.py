"""Tables of wrong answers of a reward server: its description (``GET /v1/info``) and its replies (``POST /v1/score``).

Each entry changes a correct answer. These answers are well-formed HTTP; faults of the transport are in ``bad_server``.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

from bad_server import Reply, true_info

Info = dict[str, Any]


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


def _score(text: str) -> Callable[[Reply], bytes]:
    """Return a function that replaces the first score by this text in the JSON."""

    def make_bytes(reply: Reply) -> bytes:
        reply["items"][0]["scores"]["digest"] = "HERE"
        return json.dumps(reply).replace('"HERE"', text).encode()

    return make_bytes


def _twice(key: str, again: str) -> Callable[[Reply], bytes]:
    """Return a function that inserts the key with another value before its first occurrence."""
    return lambda reply: json.dumps(reply).replace(f'"{key}":', f'"{key}": {again}, "{key}":', 1).encode()


WRONG_REPLIES: dict[str, Callable[[Reply], bytes]] = {
    **{
        f"a score of {text}": _score(text)
        for text in ("1e300", "-1e300", "1e999", "-1e999", "1e39", "1.0000001", "-0.0000001", "2")
    },
    **{
        f"a score of {text}": _score(text)
        for text in ("Infinity", "-Infinity", "NaN", "nan", "1" + "0" * 400, "9" * 5000, "0x1", "01")
    },
    **{
        f"a score of {text}": _score(text)
        for text in (".5", "5.", "+0.5", "1e", "0,5", "½", "'0.5'", "undefined", "True", "[]", "{}")
    },
    **{
        f"a score of {text}": _score(text)
        for text in ("false", "true", '""', '"NaN"', '"0.5"', "[0.5]", '{"value": 0.5}', "1e-400e1")
    },
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
