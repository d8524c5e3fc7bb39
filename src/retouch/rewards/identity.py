"""A reward's fingerprint: it changes when the reward could score differently, so that a resumed run can tell."""

import hashlib
import inspect
import json
import sys
from dataclasses import astuple
from typing import Protocol, runtime_checkable

from retouch.protocols import Reward
from retouch.types import Json


@runtime_checkable
class Fingerprinted(Protocol):
    """A reward that scores by more than its class and columns say: a rubric in a file, the weights of a model, its arguments.

    Addresses are not part of it: the same judge at another URL is the same judge.
    """

    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class Wrapper(Protocol):
    """A reward that returns the scores of another one, such as a cache."""

    @property
    def wrapped(self) -> Reward: ...


def describe(reward: Reward) -> dict[str, Json]:
    """What the reward scores by, as JSON: its class, a hash of its module's source, its columns, and its own ``fingerprint``."""
    while isinstance(reward, Wrapper):
        reward = reward.wrapped
    kind = type(reward)
    own = reward.fingerprint if isinstance(reward, Fingerprinted) else None
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "source": hashlib.sha256(inspect.getsource(sys.modules[kind.__module__]).encode()).hexdigest()[:16],
        "columns": {name: list(astuple(column)) for name, column in reward.columns.items()},
        "own": own,
    }


def fingerprint(reward: Reward) -> str:
    """16 hexadecimal digits of the SHA-256 of ``describe``."""
    return short(describe(reward))


def short(described: object) -> str:
    """16 hexadecimal digits of the SHA-256 of a description in JSON."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
