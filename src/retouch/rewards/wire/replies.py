"""What a reward server answers, and the check that a reply must pass before a number of it is believed.

``{"judges": {reward: [fingerprint]}, "items": [{"id", "scores": {column: number or null}, "errors": {reward: code}}]}``.
Null means "could not be judged"; a column is left out only where its reward has an error for the item. Items may come in any order.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from retouch.types import Column


class BadReply(ValueError):
    """A reply that cannot be believed; the message is a short reason, fit for a log or a metric."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a true reply holds. ``judges``: each reward's fingerprint; ``owner``: each column's reward."""

    columns: Mapping[str, Column]
    owner: Mapping[str, str]
    judges: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """One item's columns, NaN where they could not be judged or their reward failed; ``failed``: the rewards that did."""

    scores: Mapping[str, float]
    failed: frozenset[str]


def read_reply(body: bytes, ids: Collection[str], expected: Expected) -> dict[str, Answer]:
    """The answer for each id. BadReply where anything is not as it must be: a reply wrong in one place is not half believed."""
    reply = _parse(body)
    judges, items = reply.get("judges"), reply.get("items")
    if judges != {name: [fingerprint] for name, fingerprint in expected.judges.items()}:
        raise BadReply("other_judge")
    if not isinstance(items, list) or len(items) != len(ids):
        raise BadReply("wrong_count")
    answers: dict[str, Answer] = {}
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("id"), str):
            raise BadReply("wrong_shape")
        if item["id"] in answers:
            raise BadReply("repeated_id")
        answers[item["id"]] = _answer(item, expected)
    if answers.keys() != set(ids):
        raise BadReply("unknown_id")
    return answers


def within(value: float, column: Column) -> bool:
    """Whether a value lies in the column's range, whose ends are rounded to float32 as scores are."""
    return float(np.float32(column.low)) <= value <= float(np.float32(column.high))


def _parse(body: bytes) -> dict[str, object]:
    try:
        reply = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise BadReply("not_json") from None
    if not isinstance(reply, dict):
        raise BadReply("wrong_shape")
    return reply


def _answer(item: Mapping[str, object], expected: Expected) -> Answer:
    scores, errors = item.get("scores"), item.get("errors", {})
    if not isinstance(scores, dict) or not isinstance(errors, dict) or not errors.keys() <= expected.judges.keys():
        raise BadReply("wrong_shape")
    if scores.keys() != {name for name in expected.columns if expected.owner[name] not in errors}:
        raise BadReply("wrong_columns")
    checked = {name: _number(scores.get(name), column) for name, column in expected.columns.items()}
    return Answer(checked, frozenset(errors))


def _number(value: object, column: Column) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadReply("no_number")
    if not within(value, column):
        raise BadReply("out_of_range")
    return float(value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
