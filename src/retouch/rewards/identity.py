"""The fingerprint of a reward: it changes if the scores may change, so that a resumed run can detect another reward."""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from typing import Any, Protocol, runtime_checkable

from retouch.config import wings
from retouch.protocols import Reward
from retouch.rewards.base import RewardSection
from retouch.types import Json


@runtime_checkable
class Fingerprinted(Protocol):
    """A reward whose scores depend on more than its class and columns: a rubric in a file, the weights of a model, its arguments.

    The fingerprint contains no URL: the same judge at another URL is the same judge.
    """

    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class Wrapper(Protocol):
    """A reward that returns the scores of the reward that it wraps, for example a cache."""

    @property
    def wrapped(self) -> Reward: ...


def describe(reward: Reward) -> dict[str, Json]:
    """A description of everything that decides the scores, as JSON: the code, the columns, and the ``fingerprint`` of the reward
    or, if it has none, its arguments.

    A reward of this package is described by its kind and its ``version``, so its module may move. Any other class is described by
    its path and a hash of its module's source (of the path, if there is no source). Functions and classes of the user also have
    ``inputs``, a hash for each part that their scores depend on, and ``unknown``, the parts whose content is not known.
    """
    while isinstance(reward, Wrapper):
        reward = reward.wrapped
    made_by, kind = type(reward), getattr(reward, "kind", None)
    packaged = wings.is_own(made_by.__module__)
    code: dict[str, Json]
    if packaged and kind is not None:
        code = {"kind": kind, "version": getattr(made_by, "version", 1)}
    else:
        path = f"{made_by.__module__}:{made_by.__qualname__}"
        try:
            text = inspect.getsource(sys.modules[made_by.__module__])
        except (OSError, TypeError):  # a class that was typed into Python has no source
            text = path
        code = {"class": path, "source": hashlib.sha256(text.encode()).hexdigest()[:16]}
    if isinstance(reward, Fingerprinted):
        own: Json = reward.fingerprint
    else:
        own = reward.arguments() if isinstance(reward, RewardSection) else None
    described: dict[str, Any] = {
        **code,
        "columns": {name: list(astuple(column)) for name, column in reward.columns.items()},
        "own": own,
    }
    if packaged and kind != "function":
        return described
    from retouch.rewards.inputs import inputs_of

    inputs, unknown = inputs_of(_of_the_user(reward))
    return {**described, "inputs": inputs, **({"unknown": unknown} if unknown else {})}


def remember_run(reward: Reward, began_with: Mapping[str, Any]) -> None:
    """At the end of a run, let the user's objects in the reward be described as at its start, unless they are changed later.

    ``began_with``: the result of ``describe`` at the start.
    """
    while isinstance(reward, Wrapper):
        reward = reward.wrapped
    for name, part in (_parts(began_with["own"]) or {}).items():
        remember_run(reward.rewards[name], part)  # type: ignore[attr-defined]
    if "inputs" in began_with:
        from retouch.rewards import inputs

        inputs.remember_run(_of_the_user(reward), began_with["inputs"])


def _of_the_user(reward: Reward) -> Any:
    """The function or the object of the user that scores."""
    model = getattr(reward, "model", None)
    return model.function if getattr(reward, "kind", None) == "function" and model is not None else reward


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each difference between two descriptions of a reward; nothing if both describe the same scores.

    Earlier releases described the rewards of this package by class and source, and without arguments, and had no ``inputs``; these
    are not compared.
    """
    earlier = wings.is_own(str(before.get("class", ""))) and "kind" in now
    for key in ("columns", "own") if earlier else now:
        was, new = before.get(key), now[key]
        if was == new or (earlier and key == "own" and was is None) or key == "unknown" or (key == "inputs" and was is None):
            continue
        if key == "inputs":
            yield from changed_keys(was or {}, new)
            continue
        parts, new_parts = (_parts(each) if key == "own" else None for each in (was, new))
        if key == "source":
            yield f"the code of {now['class']} was changed"
        elif parts is not None and new_parts is not None and parts.keys() == new_parts.keys():
            yield from (f"{name}: {line}" for name in parts for line in changes(parts[name], new_parts[name]))
        else:
            yield f"{key}: {was} in the run, {new} now"


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each key that is only in one of the mappings, or whose values differ."""
    for key in sorted({**before, **now}):
        if before.get(key) != now.get(key):
            yield f"{key} {'is new' if key not in before else 'is gone' if key not in now else 'was changed'}"


def _parts(own: object) -> dict[str, Any] | None:
    """The descriptions inside the fingerprint of a ``CompositeReward``, by name; None for any other fingerprint."""
    if not isinstance(own, str) or not own.startswith("{"):
        return None
    try:
        parts = json.loads(own)
    except ValueError:
        return None
    return parts if all(isinstance(part, dict) and "columns" in part for part in parts.values()) else None


def fingerprint(reward: Reward) -> str:
    """16 hexadecimal digits of the SHA-256 of ``describe(reward)``."""
    return short(describe(reward))


def short(described: object) -> str:
    """16 hexadecimal digits of the SHA-256 of a description in JSON."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
