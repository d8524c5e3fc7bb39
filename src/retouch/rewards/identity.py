"""What a reward judges by, as a short text: it changes when the judge does, so that a resumed run can tell."""

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
    """A reward that knows more about its identity than its class and arguments say: a rubric in a file, a model's weights.

    Not where it is asked: the same judge at another address is the same judge.
    """

    @property
    def fingerprint(self) -> str: ...


@runtime_checkable
class Wrapper(Protocol):
    """A reward that gives what another one does, and says so."""

    @property
    def wrapped(self) -> Reward: ...


def describe(reward: Reward) -> dict[str, Json]:
    """What the reward judges by: its class, a hash of its module's source, its columns, and what it says of itself."""
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
    """16 hexadecimal digits over ``describe``."""
    return short(describe(reward))


def short(described: object) -> str:
    """16 hexadecimal digits that stand for a description in JSON."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
