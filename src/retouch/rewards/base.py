"""The base class of all rewards: the keys that they share, and the methods that the rest of a run calls.

A reward is one class. Its fields are the keys of the recipe's ``reward`` section, and its instances score images. So the same class
serves a recipe (``reward: { kind: 'clip', path: ... }``) and Python (``ClipReward(path=...)``).

Neither this module nor a module of a reward imports torch at the top, because recipes are read without torch. Import torch inside
``load`` and ``__call__``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PrivateAttr, Tag

from retouch.config.section import UNTAGGED, Section, Share
from retouch.protocols import Reward
from retouch.types import Column, Json, Sample, Scores, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from PIL.Image import Image
    from torch import Tensor


def _text(path: Any) -> Any:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("give an address as http://host:port/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("give the address without a user, a password, a query or a fragment")
    return url.rstrip("/")


Address: TypeAlias = Annotated[str, AfterValidator(_address)]
"""The URL of a server, without a key in it."""
Device: TypeAlias = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")] | None
"""The device of a reward's model; None for the run's device for rewards."""
PathText: TypeAlias = Annotated[str, BeforeValidator(_text)]
"""A path or a Hugging Face id; in Python, a ``pathlib.Path`` is accepted too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFacts:
    """Facts about a training phase that a reward may need.

    ``rows``: samples per step. ``group_size``: samples per group. ``chunk``: samples that are rolled out and scored at once.
    """

    rows: int
    group_size: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run that a reward may need.

    ``writes_text``: the policy is a language model. ``trained_columns``: the full names of the columns that ``combine`` uses, None
    if they are not known yet. ``eval_column``: the column that evaluation reports, None for the combined reward.
    """

    writes_text: bool
    trained_columns: tuple[str, ...] | None
    eval_column: str | None
    phases: tuple[PhaseFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """Facts about the tasks of a data section that a reward may need. ``path``: the section's path in the recipe, e.g. ``data``."""

    path: str
    kind: str
    has_source: bool
    has_target: bool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that a reward loads into the process of the run. ``path``: its folder or Hugging Face id. ``device``: None for the
    run's device for rewards. ``stored``: share of the bytes in this dtype that its weights take."""

    path: str
    dtype: str
    device: str | None
    stored: float = 1.0


def whole_group_problems(run: RunFacts, *, column: str, reward: str) -> Iterator[str]:
    """Yield one line for each setting that does not give whole groups to a reward that compares the images of a task.

    ``column``: the full name of the reward's column. ``reward``: the name of the reward in messages.
    """
    evaluated = run.trained_columns or () if run.eval_column is None else (run.eval_column,)
    if column in evaluated:
        yield f"eval.column: {reward} compares the images of a task, but evaluation makes one image per task; name another column"
    for phase in run.phases:
        if phase.chunk < phase.rows and phase.chunk % phase.group_size:
            split = f"{phase.chunk} splits groups of {phase.group_size}"
            yield f"rollout.chunk: {split}, but {reward} compares whole groups; use a multiple of the group size"


def _form(value: Any) -> str | None:
    if isinstance(value, str):
        return "formula"
    return UNTAGGED if isinstance(value, Mapping) else None


Combine: TypeAlias = Annotated[
    Annotated[dict[str, float], Tag(UNTAGGED)] | Annotated[str, Tag("formula")],
    Discriminator(
        _form,
        custom_error_type="combine",
        custom_error_message="Input should be a weight for each column, such as {overall: 1}, or a formula, such as 'a * b'",
    ),
]


def unchanged(reward: Reward) -> Reward:
    """Return the reward unchanged: the default of ``keep``."""
    return reward


WIN_PROBABILITY: Mapping[str, Column] = {
    "win_probability": Column(0.0, 1.0),
    "win_probability_sd": Column(0.0, 1.0, diagnostic=True),
}
"""The columns that a calibrated reward adds to those of the reward that it maps."""


class BudgetSpent(ValueError):
    """The total budget of a judge or a server is too small for the next calls. The run ends on all ranks, with a checkpoint."""


@dataclass(eq=False)
class JudgeClients:
    """The clients of a run: rewards with equal judge sections share one client. ``device``: the default device of models whose
    section names none."""

    device: torch.device | str
    _opened: dict[str, Any] = field(default_factory=dict, init=False)

    def open(self, model: Any) -> Any:
        """Return the client of a judge's section; its ``open`` is called at the first time, and may raise ValueError."""
        name = f"{type(model).__module__}:{type(model).__qualname__} {model.model_dump_json()}"
        if name not in self._opened:
            self._opened[name] = model.open(device=self.device)
        return self._opened[name]


class RewardSection(Section):
    """A reward. Derived classes declare ``columns`` and score samples when they are called (``retouch.protocols.Reward``)."""

    combine: Combine = Field(default={})
    """The number that the policy is trained on: a weight for each column, so that the reward is the weighted sum (a column with
    weight 0 is only logged), or a formula over columns such as ``sqrt(alignment * quality)``."""
    max_missing: Share = 0.2
    """Largest share of a step's samples that may have a missing score. The run stops if more are missing."""

    columns: ClassVar[Mapping[str, Column]]
    """Each score that a call returns, with its range."""
    version: ClassVar[int] = 1
    """Increase it with every change of the class that may change the scores of the same samples. A run can only be resumed with the
    version that it began with. For a reward class of your own, a hash of its module's source is used instead."""
    cli_key: ClassVar[str | None] = None
    """The key that the text after the colon sets on a command line: ``clip:FOLDER`` is ``{kind: 'clip', path: 'FOLDER'}``."""
    changeable: ClassVar[frozenset[str]] = frozenset({"device"})
    """Keys that may differ when a run is resumed, because they change no score."""
    reads_completions: ClassVar[bool] = False
    """Whether the reward scores the text that the policy wrote. Only such a reward receives ``Sample.completion``."""
    reads_text: ClassVar[bool] = False
    """Whether every task must have a ``text``."""
    asks_judge: ClassVar[bool] = False
    """Whether the reward asks a vision-language model."""
    needs_source: ClassVar[bool] = False
    """Whether every task must have a source image."""
    needs_target: ClassVar[bool] = False
    """Whether every task must have a target image."""
    compares_groups: ClassVar[bool] = False
    """Whether the reward compares the samples of a task with each other, so that a single sample has no score."""
    gradient_column: ClassVar[str | None] = None
    """For a differentiable reward: the column that ``score_tensors`` computes. None if the reward has only one column."""
    data_kinds: ClassVar[tuple[str, ...]] = ()
    """The kinds of data whose tasks the reward can score; empty if it can score the tasks of all kinds."""

    _model: Any = PrivateAttr(default=None)

    @property
    def name(self) -> str:
        """The name of the reward in messages: its kind, or the name of its class if it has no kind."""
        return str(getattr(self, "kind", type(self).__name__))

    @property
    def model(self) -> Any:
        """The object that ``load`` returned. It is loaded at the first use, unless ``build`` has loaded it already."""
        if self._model is None:
            self._model = self.load(getattr(self, "device", None) or "cpu")
        return self._model

    def load(self, device: "torch.device | str") -> Any:
        """Load what scoring needs, for example weights or an OCR model. Called once, before the first call of the reward.

        ``device``: the ``device`` key of the section, or the run's device for rewards if the key is null. Raises ValueError if
        something is not on this machine.
        """
        return None

    def with_model(self, model: Any) -> Self:
        """A copy of the reward that uses ``model`` instead of calling ``load``."""
        made = self.model_copy()
        made._model = model
        return made

    def build(
        self,
        *,
        device: "torch.device | str" = "cpu",
        clients: "JudgeClients | None" = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Load everything that scoring needs, and return a reward that is ready to score.

        ``device``: for models whose section names no device. ``clients``: the clients of vision-language judges, which the rewards
        of a run share. ``keep``: wraps each reward, for example with the cache of the ledger. Raises ValueError if weights, keys
        or packages are missing.
        """
        own = getattr(self, "device", None)
        ready: Any = self.with_model(self.load(device if own is None else own))
        return keep(ready)

    def known_columns(self) -> Mapping[str, Column] | None:
        """The columns of the reward, or None if they are known only after ``build``."""
        return self.columns

    def arguments(self) -> dict[str, Any]:
        """The keys that decide the scores, as JSON: all keys of the derived class that must not change when a run is resumed."""
        return self.model_dump(mode="json", exclude={"kind", *RewardSection.model_fields, *self.changeable})

    def parts(self, path: str = "reward") -> Iterator[tuple[str, str, "RewardSection"]]:
        """Yield (path in the recipe, prefix of its column names, section) for each reward that this section contains.

        ``path``: the path of this section. A section that contains no other reward yields itself.
        """
        yield path, "", self

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield one line, which says what to do, for each setting that cannot work with the rest of the recipe.

        ``path`` and ``prefix``: as in ``parts``.
        """
        if self.reads_completions and not run.writes_text:
            yield f"{path}.kind: {self.name} scores the text that a policy wrote, but this policy makes images; use another reward"

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """Yield one line, which says what to do, for each input that the reward needs but the tasks do not have."""
        where = f"{tasks.path}.kind"
        if self.data_kinds and tasks.kind not in self.data_kinds:
            known = " or ".join(self.data_kinds)
            yield f"{path}.kind: {self.name} scores only tasks of {known}, but {where} is {tasks.kind!r}; use photos or import"
        if self.needs_source and not tasks.has_source:
            yield f"{path}.kind: {self.name} compares with a source image, but {where} {tasks.kind!r} has none; remove this reward"
        if self.needs_target and not tasks.has_target:
            none = f"{where} {tasks.kind!r} has none"
            yield f"{path}.kind: {self.name} compares with a target image, but {none}; use folder or hub data"

    def require_columns(self, tasks: Sequence[Task]) -> None:
        """Raise ValueError if the reward reads a column of the data set that none of ``tasks`` has. Called after ``build`` with the
        first held-out tasks, before images are made for them; a task is loaded when it is accessed."""

    def changeable_paths(self, path: str) -> Iterator[str]:
        """Yield the paths of the keys that may differ when a run is resumed, together with all keys below them.

        ``path``: the path of this section in the recipe.
        """
        for key in self.changeable:
            yield f"{path}.{key}"

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield the models that the reward keeps in this process, for the doctor: those with a size that is known without
        loading."""
        yield from ()

    def variables(self) -> Iterator[tuple[str, str]]:
        """Yield each environment variable that the reward needs, with a description of what needs it."""
        yield from ()

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """Yield each environment variable that holds a key which the reward sends to a server, with the URL of that server."""
        yield from ()

    @classmethod
    def from_cli(cls, argument: str) -> Json:
        """The value of the ``cli_key`` key, from the text after the colon on a command line. Raises ValueError for an invalid
        text."""
        return argument


class NoReward(RewardSection):
    """No reward, for a run that learns only from pairs of the data (``dpo`` with ``pairs: 'data'``). Evaluation then measures the
    share of held-out pairs that are ordered correctly, and makes only the images of ``samples``."""

    kind: Literal["none"] = "none"

    columns: ClassVar[Mapping[str, Column]] = {}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        return {}


def visible_samples(reward: Reward, samples: Sequence[Sample]) -> list[Sample]:
    """The samples without the text that the policy wrote, unless the reward declares ``reads_completions``. So a policy cannot
    address its judge."""
    if getattr(reward, "reads_completions", False):
        return list(samples)
    return [sample if sample.completion is None else Sample(sample.task, sample.image) for sample in samples]


def compares_groups(reward: Reward) -> bool:
    """Whether the reward, or a reward inside it, compares the samples of a task, so that a call must contain whole groups."""
    return bool(getattr(reward, "compares_groups", False))


def source_image(task: Task) -> Image:
    """The first source image. Raises ValueError if the task has none."""
    if not task.images:
        raise ValueError(f"task {task.id!r} has no source image, but this reward compares with it")
    return task.images[0]


def score_images(
    samples: Sequence[Sample], score: Callable[[Task, Image], Float[Tensor, ""] | float], *, missing: float = 0.0
) -> Float[Tensor, " b"]:
    """One column, float32: ``score`` of each task and image, without gradient; ``missing`` for a sample without an image."""
    import torch

    with torch.no_grad():
        found = [missing if sample.image is None else float(score(sample.task, sample.image)) for sample in samples]
    return torch.tensor(found, dtype=torch.float32)


def close(part: object) -> None:
    """Close connections and threads of a reward or its client, if it has any."""
    if (own := getattr(part, "close", None)) is not None:
        own()
