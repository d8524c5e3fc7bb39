"""The reply of ``POST /v1/score``, and the checks that a reply must pass before any of its scores is used.

``{"judges": {reward: [fingerprint]}, "items": [{"id", "scores": {column: number or null}, "errors": {reward: code}}]}``.
Null means "could not be judged". A column is absent only if its reward has an error for the item. Items may be in any order.

Reading a reply takes memory in proportion to what was requested: the number of JSON values is bounded before it is parsed.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from retouch.records.shapes import strict_json
from retouch.types import Column
from retouch_serve.wire.schema import LARGEST

_NODES, _NODES_OF_ITEM = 1000, 16  # JSON values per reply and per item, plus two per item for each column and reward


class InvalidReply(ValueError):
    """A reply that failed a check; the message is a short code for logs and metrics."""


@dataclass(frozen=True, slots=True)
class ExpectedReply:
    """What a valid reply contains. ``judges``: the fingerprint of each reward. ``owner``: the reward of each column."""

    columns: Mapping[str, Column]
    owner: Mapping[str, str]
    judges: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ItemScores:
    """The scores of one item, NaN if a column could not be judged or its reward failed. ``failed``: the rewards that failed."""

    scores: Mapping[str, float]
    failed: frozenset[str]


def read_reply(body: bytes, ids: Collection[str], expected: ExpectedReply) -> dict[str, ItemScores]:
    """The scores by id. Raises InvalidReply if any check fails: a reply with a single error is rejected as a whole."""
    wanted = _NODES_OF_ITEM + 2 * (len(expected.columns) + len(expected.judges))
    reply = _parse(body, most=_NODES + len(ids) * wanted)
    judges, items = reply.get("judges"), reply.get("items")
    if judges != {name: [fingerprint] for name, fingerprint in expected.judges.items()}:
        raise InvalidReply("other_judge")
    if not isinstance(items, list) or len(items) != len(ids):
        raise InvalidReply("wrong_count")
    scores: dict[str, ItemScores] = {}
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            raise InvalidReply("wrong_shape")
        if item["id"] in scores:
            raise InvalidReply("repeated_id")
        scores[item["id"]] = _item_scores(item, expected)
    if scores.keys() != set(ids):
        raise InvalidReply("unknown_id")
    return scores


def _parse(body: bytes, *, most: int) -> dict[str, object]:
    if body.count(b",") + body.count(b"[") + body.count(b"{") > most:
        raise InvalidReply("too_many_values")
    try:
        reply = strict_json(body)
    except ValueError:
        raise InvalidReply("not_json") from None
    if not isinstance(reply, dict):
        raise InvalidReply("wrong_shape")
    return reply


def _item_scores(item: Mapping[str, object], expected: ExpectedReply) -> ItemScores:
    scores, errors = item.get("scores"), item.get("errors", {})
    if not isinstance(scores, dict) or not isinstance(errors, dict) or not errors.keys() <= expected.judges.keys():
        raise InvalidReply("wrong_shape")
    if scores.keys() != {name for name in expected.columns if expected.owner[name] not in errors}:
        raise InvalidReply("wrong_columns")
    checked = {name: _number(scores.get(name), column) for name, column in expected.columns.items()}
    return ItemScores(checked, frozenset(errors))


def _number(value: object, column: Column) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidReply("no_number")
    if not abs(value) <= LARGEST or not column.contains(value):
        raise InvalidReply("out_of_range")
    return float(value)
