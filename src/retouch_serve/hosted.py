"""The rewards of a server: parsed from the command line, built as a recipe builds them, described to clients, called on a batch.

``recipe/reward_arguments.py::read_reward`` defines the texts of the command line; ``NAME=`` may precede each text.
"""

import importlib
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from retouch.config import wings
from retouch.config.consent import classes_named
from retouch.config.imports import module_of
from retouch.distributed.ranks import scoring_device
from retouch.protocols import Reward
from retouch.recipe.reward_arguments import modules_in_argument, parse_reward, read_reward
from retouch.rewards import identity
from retouch.rewards.base import RewardSection, compares_groups
from retouch.rewards.function import FunctionReward
from retouch.rewards.scoring import as_scores, shaped_column, with_images
from retouch.types import Column, Sample, Scores
from retouch_serve.wire import LARGEST, NAME, ColumnInfo, ErrorCode, RewardInfo

SampleResult: TypeAlias = Mapping[str, float | None] | ErrorCode
Call: TypeAlias = Callable[[Sequence[Sample]], "Future[Scores]"]
_LOG = logging.getLogger("retouch.serving")
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
        """The description of the reward in ``GET /v1/info``."""
        columns = {name: ColumnInfo(**asdict(column)) for name, column in self.columns.items()}
        kind = f"{type(self.reward).__module__}:{type(self.reward).__qualname__}"
        return RewardInfo(name=self.name, kind=kind, fingerprint=self.fingerprint, columns=columns)


def parse_specs(words: Sequence[str]) -> list[RewardSpec]:
    """Parse the rewards of the command line. Raises ValueError if a reward is unknown, or if two have the same name."""
    specs: list[RewardSpec] = []
    for word in words:
        found = None if word.lstrip().startswith("{") else _NAMED.match(word)
        given, rest = (found[1], found[2]) if found else (None, word)
        section = read_reward(rest)
        name = given or str(section.get("class", section["kind"])).rpartition(":")[2].lower()
        require_name(name)
        if name in [spec.name for spec in specs]:
            raise ValueError(f"two rewards have the name {name}; give each its own name: a={words[0]} b=...")
        typed = tuple(modules_in_argument(rest))
        parse_reward(section, allow_imports=typed)
        specs.append(RewardSpec(name, section, named=given is not None, allow_imports=typed))
    return specs


def build(spec: RewardSpec, *, sole: bool) -> HostedReward:
    """Build the reward and load its weights. Unless it is the ``sole`` reward and unnamed, its column names begin with its name.
    Raises ValueError if it cannot be built."""
    reward = parse_reward(spec.section, allow_imports=spec.allow_imports).build(device=scoring_device())
    prefix = "" if sole and not spec.named else f"{spec.name}/"
    public = {name: f"{prefix}{name}" for name in reward.columns}
    return HostedReward(spec.name, reward, public, fingerprint(spec.section, reward))


def host_reward(given: Any, *, sole: bool) -> HostedReward:
    """Host an argument of ``retouch.serve``: a text as on the command line, a section, a reward or a function."""
    if isinstance(given, str):
        (spec,) = parse_specs([given])
        return build(spec, sole=sole)
    reward: Any = getattr(given, "reward", given)  # the result of retouch.rewards.load has the attribute
    if not isinstance(reward, RewardSection) and not hasattr(reward, "columns"):
        reward = FunctionReward.of(reward)
    section: Mapping[str, object] = {}
    if isinstance(reward, RewardSection):
        section = reward.model_dump(mode="json")
        reward = reward.build(device=scoring_device())
    name = str(getattr(reward, "name", None) or section.get("kind") or type(reward).__name__.lower())
    public = {column: column if sole else f"{name}/{column}" for column in reward.columns}
    return HostedReward(name, reward, public, fingerprint(section, reward))


def rebuild(spec: RewardSpec, old: HostedReward) -> HostedReward:
    """Build the reward again, after reloading the user's modules that its section names, also those of rewards inside the reward.
    Raises ValueError if its columns have changed."""
    parts = parse_reward(spec.section, allow_imports=spec.allow_imports).parts()
    named = [module_of(path) for _, path in classes_named(spec.section)]
    for module in dict.fromkeys([*named, *(type(part).__module__ for _, _, part in parts)]):
        if not wings.is_own(module):
            importlib.reload(sys.modules[module])
    new = build(spec, sole=set(old.public) == set(old.public.values()))
    if new.columns != old.columns:
        raise ValueError(f"{spec.name} now has other columns or ranges; restart the server")
    return new


def fingerprint(section: Mapping[str, object], reward: Reward) -> str:
    """A hash of the reward's section and of ``identity.describe``, 16 hexadecimal digits."""
    return identity.short([dict(section), identity.describe(reward)])


def require_name(name: str) -> None:
    """Raise ValueError if requests cannot contain this name of a reward."""
    if not re.fullmatch(NAME, name):
        raise ValueError(f"{name!r} cannot be a reward's name: use letters, digits, dots, dashes and underscores, at most 64")


def score_samples(hosted: HostedReward, samples: Sequence[Sample], *, call: Call) -> list[SampleResult]:
    """For each sample, its columns by their public names (None: the score is missing), or an error code.

    ``call`` runs the reward. If the reward raises an error, the batch is split in halves until the failing samples are isolated.
    As in a run, the reward does not get samples without an image; they have the worst value of each column, and no diagnostics.
    """
    drawn = with_images(samples)
    results = iter(_scored(hosted, drawn, call=call) if drawn else ())
    no_image = {hosted.public[name]: None if column.diagnostic else column.worst for name, column in hosted.reward.columns.items()}
    return [no_image if sample.image is None else next(results) for sample in samples]


def _scored(hosted: HostedReward, samples: Sequence[Sample], *, call: Call) -> list[SampleResult]:
    future = call(samples)
    error = future.exception()
    if error is None:
        return _checked(hosted, future.result(), len(samples))
    if len(samples) == 1:
        _LOG.error("reward %s failed on task %r", hosted.name, samples[0].task.id[:200], exc_info=error)
        return ["reward_failed"]
    half = len(samples) // 2
    return _scored(hosted, samples[:half], call=call) + _scored(hosted, samples[half:], call=call)


def _checked(hosted: HostedReward, returned: object, count: int) -> list[SampleResult]:
    """Check what the reward returned, as a run does, and return the scores by sample. A wrong shape fails the whole batch; a value
    out of range fails its sample."""
    try:
        scores = as_scores(hosted.reward, returned)
        columns = {name: shaped_column(name, scores, count) for name in hosted.reward.columns}
    except ValueError as error:
        _LOG.error("reward %s: %s", hosted.name, error)
        return ["reward_disagrees"] * count
    rows: list[dict[str, float | None]] = [{} for _ in range(count)]
    wrong: set[int] = set()
    for name, column in hosted.reward.columns.items():
        for row, value in enumerate(columns[name].tolist()):
            missing = value != value
            rows[row][hosted.public[name]] = None if missing else value
            if not missing and not column.contains(value):
                _LOG.error("reward %s: column %r gave %r, outside %r to %r", hosted.name, name, value, column.low, column.high)
                wrong.add(row)
    return ["reward_disagrees" if row in wrong else scored for row, scored in enumerate(rows)]
