"""The rewards of a server: parsed from the command line, built as a recipe builds them, and described to clients.

``recipe/reward_arguments.py::read_reward`` defines the texts of the command line; ``NAME=`` may precede each text.
"""

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from retouch.config import wings
from retouch.config.consent import classes_named
from retouch.config.imports import module_of
from retouch.distributed.ranks import scoring_device
from retouch.protocols import Reward
from retouch.recipe.reward_arguments import modules_in_argument, parse_reward, read_reward
from retouch.rewards import identity
from retouch.rewards.base import compares_groups
from retouch.types import Column
from retouch_serve.wire.schema import LARGEST, NAME, ColumnInfo, RewardInfo

_NAMED = re.compile(r"^([^:=/\\{]+)=(.+)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """A reward to host: its name and its recipe section. ``named``: the user chose the name. ``allow_imports``: modules that may be
    imported, because the user named their classes on the command line."""

    name: str
    section: Mapping[str, object]
    named: bool
    allow_imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class HostedReward:
    """A built reward. ``public``: the reward's column names, mapped to the names that clients see.

    Raises ValueError if the name cannot be part of a request, if the reward compares the samples of a task, because batches split
    groups, and if a column's range is too large (a sample without an image scores the worst end of the range).
    """

    name: str
    reward: Reward
    public: Mapping[str, str]
    fingerprint: str

    def __post_init__(self) -> None:
        require_name(self.name)
        if compares_groups(self.reward):
            raise ValueError(
                f"{self.name} compares the images of a task, but a server scores batches that split groups; put this reward into "
                "the recipe of the run instead"
            )
        for name, column in self.reward.columns.items():
            if not -LARGEST <= column.low <= column.high <= LARGEST:
                raise ValueError(
                    f"{self.name}: column {name!r} has the range {column.low} to {column.high}; declare one within {LARGEST:g}"
                )

    @property
    def columns(self) -> dict[str, Column]:
        """The columns by their public names."""
        return {public: self.reward.columns[own] for own, public in self.public.items()}

    def info(self) -> RewardInfo:
        """Return the description of the reward in ``GET /v1/info``."""
        columns = {name: ColumnInfo(**asdict(column)) for name, column in self.columns.items()}
        made_by = type(self.reward)
        kind = f"{made_by.__module__}:{made_by.__qualname__}"
        return RewardInfo(name=self.name, kind=kind, fingerprint=self.fingerprint, columns=columns)


def parse_specs(words: Sequence[str]) -> list[RewardSpec]:
    """Parse the rewards of the command line. Raises ValueError if a reward is unknown, or if two have the same name."""
    specs = [_parse_spec(word) for word in words]
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two rewards have the name {name}; give each its own name: a={words[0]} b=...")
    return specs


def build(spec: RewardSpec, *, sole: bool) -> HostedReward:
    """Build the reward and load its weights. Unless it is the ``sole`` reward and unnamed, its column names begin with its name.

    Raises ValueError if it cannot be built.
    """
    reward = parse_reward(spec.section, allow_imports=spec.allow_imports).build(device=scoring_device())
    prefix = "" if sole and not spec.named else f"{spec.name}/"
    public = {name: f"{prefix}{name}" for name in reward.columns}
    return HostedReward(spec.name, reward, public, fingerprint(spec.section, reward))


def rebuild(spec: RewardSpec, old: HostedReward) -> HostedReward:
    """Build the reward again, after reloading the user's modules that its section names. Raises ValueError if its columns have
    changed."""
    for module in _user_modules(spec):
        importlib.reload(sys.modules[module])
    new = build(spec, sole=set(old.public) == set(old.public.values()))
    if new.columns != old.columns:
        raise ValueError(f"{spec.name} now has other columns or ranges; restart the server")
    return new


def fingerprint(section: Mapping[str, object], reward: Reward) -> str:
    """Return a hash of the reward's section and of ``identity.describe``, 16 hexadecimal digits."""
    return identity.short([dict(section), identity.describe(reward)])


def require_name(name: str) -> None:
    """Raise ValueError if requests cannot contain this name of a reward."""
    if not re.fullmatch(NAME, name):
        raise ValueError(f"{name!r} cannot be a reward's name: use letters, digits, dots, dashes and underscores, at most 64")


def _user_modules(spec: RewardSpec) -> list[str]:
    """The modules outside this package of the classes and functions in the section, also of rewards inside the reward."""
    parts = parse_reward(spec.section, allow_imports=spec.allow_imports).parts()
    named = [module_of(path) for _, path in classes_named(spec.section)]
    found = dict.fromkeys([*named, *(type(part).__module__ for _, _, part in parts)])
    return [module for module in found if not wings.is_own(module)]


def _parse_spec(word: str) -> RewardSpec:
    found = None if word.lstrip().startswith("{") else _NAMED.match(word)
    name, rest = (found[1], found[2]) if found else (None, word)
    section = read_reward(rest)
    called = name or str(section.get("class", section["kind"])).rpartition(":")[2].lower()
    require_name(called)
    typed = tuple(modules_in_argument(rest))
    parse_reward(section, allow_imports=typed)
    return RewardSpec(called, section, named=name is not None, allow_imports=typed)
