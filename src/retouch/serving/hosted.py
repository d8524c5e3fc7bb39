"""Rewards that a server hosts: named on the command line, built as a recipe builds them, with a fingerprint of what they judge by.

A reward is named as ``recipe/reward_words.py::read_reward`` reads it. ``NAME=`` before it names it in the server.
"""

import importlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from retouch.assembly.reward import build_reward
from retouch.protocols import Reward
from retouch.recipe.reward_words import parse_reward, read_reward
from retouch.rewards import identity
from retouch.rewards.wire.schema import NAME, ColumnInfo, RewardInfo
from retouch.types import Column

_NAMED = re.compile(r"^([A-Za-z0-9_.-]{1,64})=(.+)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for: a name, and the recipe section that builds the reward. ``named``: the name was given by the user."""

    name: str
    section: Mapping[str, object]
    named: bool


@dataclass(frozen=True, slots=True, eq=False)
class Hosted:
    """A reward, the columns that callers see, and what they call them by: ``public`` maps the reward's own names to theirs."""

    name: str
    reward: Reward
    public: Mapping[str, str]
    fingerprint: str

    @property
    def columns(self) -> dict[str, Column]:
        return {public: self.reward.columns[own] for own, public in self.public.items()}

    def info(self) -> RewardInfo:
        """What callers are told."""
        columns = {name: ColumnInfo(**asdict(column)) for name, column in self.columns.items()}
        return RewardInfo(name=self.name, kind=_path(type(self.reward)), fingerprint=self.fingerprint, columns=columns)


def read_orders(words: Sequence[str]) -> list[Order]:
    """The rewards named on the command line. ValueError: an unknown name, or two of one name."""
    orders = [_read(word) for word in words]
    names = [order.name for order in orders]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two rewards are called {name}; name them: a={words[0]} b=...")
    return orders


def build(order: Order, *, sole: bool) -> Hosted:
    """Build the reward: its weights are loaded here. Columns of a reward that is not the ``sole`` one begin with its name.

    ValueError where it cannot be built, or declares a range that is not finite (a fault would then score an infinite number).
    """
    reward = build_reward(parse_reward(order.section), device=_device())
    for name, column in reward.columns.items():
        if not (math.isfinite(column.low) and math.isfinite(column.high) and column.low <= column.high):
            raise ValueError(f"{order.name}: column {name!r} has the range {column.low} to {column.high}; declare a finite one")
    prefix = "" if sole and not order.named else f"{order.name}/"
    public = {name: f"{prefix}{name}" for name in reward.columns}
    return Hosted(order.name, reward, public, fingerprint(order.section, reward))


def rebuild(order: Order, old: Hosted) -> Hosted:
    """The reward built anew, its module read again if it is the user's own. ValueError where its columns are not the old ones."""
    module = sys.modules[type(old.reward).__module__]
    if module.__name__.partition(".")[0] != "retouch":
        importlib.reload(module)
    new = build(order, sole=set(old.public) == set(old.public.values()))
    if new.columns != old.columns:
        raise ValueError(f"{order.name} now has other columns or ranges; stop the server and start it again")
    return new


def fingerprint(section: Mapping[str, object], reward: Reward) -> str:
    """16 hexadecimal digits over the arguments, the class, its module's source, the columns, and what the reward says of itself."""
    return identity.short([dict(section), identity.describe(reward)])


def _device() -> str:
    """Where models lie whose section does not say: the first GPU that the replica is given, or the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _read(word: str) -> Order:
    found = None if word.lstrip().startswith("{") else _NAMED.match(word)
    name, rest = (found[1], found[2]) if found else (None, word)
    section = read_reward(rest)
    called = name or str(section.get("class", section["kind"])).rpartition(":")[2].lower()
    if not re.match(NAME, called):
        raise ValueError(f"{called!r} cannot be a reward's name: letters, digits, dots, dashes, at most 64")
    parse_reward(section)
    return Order(called, section, named=name is not None)
