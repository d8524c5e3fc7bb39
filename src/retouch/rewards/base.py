"""The base class of all rewards: the keys that they share, and everything that the rest of a run asks of a reward.

A reward is one class. Its fields are the keys of the recipe's ``reward`` section, and its instances score images. So the same class
serves a recipe (``reward: { kind: 'clip', path: ... }``) and Python (``ClipReward(path=...)``).

This module imports no torch, and no module of a reward does: recipes are read without it. Import it inside ``load`` and
``__call__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, TypeAlias, runtime_checkable

from pydantic import Discriminator, Field, PrivateAttr, Tag

from retouch.config.section import UNTAGGED, Section, Share
from retouch.protocols import Reward
from retouch.rewards.facts import Device, LoadedModel, PathText, RunFacts, TaskFacts
from retouch.types import Column, Json, Sample, Scores, Task

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from retouch.rewards.vlm.base import JudgeClients


def _form(value: Any) -> str:
    return "formula" if isinstance(value, str) else UNTAGGED


Combine: TypeAlias = Annotated[
    Annotated[dict[str, float], Tag(UNTAGGED)] | Annotated[str, Tag("formula")],
    Discriminator(_form),
]


def unchanged(reward: Reward) -> Reward:
    """The reward itself."""
    return reward


class RewardSection(Section):
    """A reward. Derived classes declare ``columns`` and score samples when they are called (``retouch.protocols.Reward``)."""

    combine: Combine = Field(default={})
    """What the policy is trained on: weights of columns, whose weighted sum is the reward (weight 0: only logged), or a formula
    over columns, ``sqrt(alignment * quality)``."""
    max_missing: Share = 0.2
    """Largest share of a step's samples that may come back without a score before the run stops."""

    columns: ClassVar[Mapping[str, Column]]
    """Every score that a call returns, with its range."""
    version: ClassVar[int] = 1
    """Counts up with every change of the class after which it may score the same samples differently. A run continues only with the
    version that it began with. For a reward of your own, a hash of its module's source serves the same purpose."""
    shorthand: ClassVar[str | None] = None
    """The key that stands after the colon on a command line: ``clip:FOLDER`` is ``{kind: 'clip', path: 'FOLDER'}``."""
    changeable: ClassVar[frozenset[str]] = frozenset({"device"})
    """Keys that may differ when a run is resumed, since they change no score."""
    reads_completions: ClassVar[bool] = False
    """Whether it scores the text that the policy wrote. Only such a reward receives ``Sample.completion``."""
    reads_text: ClassVar[bool] = False
    """Whether every task must have a ``text``."""
    asks_judge: ClassVar[bool] = False
    """Whether it asks a vision-language model."""
    needs_source: ClassVar[bool] = False
    """Whether every task must have a source image."""
    needs_target: ClassVar[bool] = False
    """Whether every task must have a target image."""
    compares_groups: ClassVar[bool] = False
    """Whether it compares the samples of a task with each other, so that a sample alone has no score."""
    gradient_column: ClassVar[str | None] = None
    """Of a reward with a gradient: the column that ``score_tensors`` gives. None if there is only one."""
    data_kinds: ClassVar[tuple[str, ...]] = ()
    """The only kinds of data whose tasks it can score; empty for any."""

    _model: Any = PrivateAttr(default=None)

    @property
    def name(self) -> str:
        """What messages call it: its kind, or its class where it has none."""
        return str(getattr(self, "kind", type(self).__name__))

    @property
    def model(self) -> Any:
        """What ``load`` returned. It is loaded at the first use, where ``build`` has not loaded it before."""
        if self._model is None:
            self._model = self.load(getattr(self, "device", None) or "cpu")
        return self._model

    def load(self, device: "torch.device | str") -> Any:
        """Load what scoring needs: weights, a reader of text. Called once, before the first call. ValueError: it is not there.

        ``device``: the section's own device, else the one that the run gives to rewards.
        """
        return None

    def with_model(self, model: Any) -> Self:
        """The same reward with this ``model`` in place of what ``load`` would return."""
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
        """The reward, ready to score: all that it needs is loaded.

        ``device``: for models whose section names none. ``clients``: the clients of vision-language judges, shared by the rewards
        of a run. ``keep``: puts each reward behind a ledger. ValueError: weights, keys or packages are not there.
        """
        own = getattr(self, "device", None)
        return keep(self.with_model(self.load(device if own is None else own)))

    def known_columns(self) -> Mapping[str, Column] | None:
        """The columns, as far as the section alone tells them; None if only the built reward does."""
        return self.columns

    def arguments(self) -> dict[str, Any]:
        """The keys that decide its scores, as JSON: all of its own that may not change when a run is resumed."""
        return self.model_dump(mode="json", exclude={"kind", *RewardSection.model_fields, *self.changeable})

    def parts(self, path: str = "reward") -> Iterator[tuple[str, str, "RewardSection"]]:
        """Each reward of the section, which stands at ``path`` of the recipe: its own path, the prefix of its columns, itself."""
        yield path, "", self

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """A line for everything in the section that does not go with the rest of the recipe, with what to do about it.

        ``path`` and ``prefix``: as in ``parts``.
        """
        if self.reads_completions and not run.writes_text:
            yield f"{path}.kind: {self.name} scores what a policy wrote, and this policy makes images; use another reward"

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """The same for tasks that lack what it looks at."""
        where = f"{tasks.path}.kind"
        if self.data_kinds and tasks.kind not in self.data_kinds:
            known = " or ".join(self.data_kinds)
            yield f"{path}.kind: {self.name} scores tasks of {known} only, and {where} is {tasks.kind!r}; use photos or import"
        if self.needs_source and not tasks.has_source:
            yield f"{path}.kind: {self.name} compares with a source image, and {where} {tasks.kind!r} has none; remove it"
        if self.needs_target and not tasks.has_target:
            none = f"{where} {tasks.kind!r} has none"
            yield f"{path}.kind: {self.name} compares with a target image, and {none}; use folder or hub data"

    def changeable_paths(self, path: str) -> Iterator[str]:
        """The paths of the keys that may differ when a run is resumed, those inside of them too. ``path``: of the section."""
        for key in self.changeable:
            yield f"{path}.{key}"

    def loaded_models(self) -> Iterator[LoadedModel]:
        """The models that it keeps in this process, for plans of memory; those whose size can be known without loading them."""
        yield from ()

    def variables(self) -> Iterator[tuple[str, str]]:
        """Environment variables that it needs, each with who asks for it."""
        yield from ()

    def keys_sent(self) -> Iterator[tuple[str, str]]:
        """The environment variables of keys that it sends, each with the URL of the server."""
        yield from ()

    @classmethod
    def from_word(cls, argument: str) -> Json:
        """The value of the ``shorthand`` key, from what a command line has after the colon. ValueError: not a value of that key."""
        return argument


class NoReward(RewardSection):
    """No reward, for a run that learns only from pairs of the data (``dpo`` with ``pairs: 'data'``). Evaluation then measures the
    share of held-out pairs in the right order, and the only images it makes are those of ``samples``."""

    kind: Literal["none"] = "none"

    columns: ClassVar[Mapping[str, Column]] = {}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        return {}


class ModelReward(RewardSection):
    """A reward by one model that runs in this process."""

    path: PathText
    """Folder of the weights, or their id in the Hugging Face cache; nothing is downloaded."""
    device: Device = None
    """Where the model runs; null takes the run's device."""

    shorthand: ClassVar[str | None] = "path"

    def loaded_models(self) -> Iterator[LoadedModel]:
        """The model."""
        yield LoadedModel(self.path, "float32", self.device)


def visible_samples(reward: Reward, samples: Sequence[Sample]) -> list[Sample]:
    """The samples as this reward may see them: without the policy's text, unless it ``reads_completions``, so that no policy can
    talk to its judge."""
    if getattr(reward, "reads_completions", False):
        return list(samples)
    return [sample if sample.completion is None else Sample(sample.task, sample.image) for sample in samples]


def source_image(task: Task) -> Image:
    """The first source image. Raises ValueError if the task has none."""
    if not task.images:
        raise ValueError(f"task {task.id!r} has no source image, with which this reward compares")
    return task.images[0]


def completion_of(sample: Sample) -> str:
    """The text that the policy wrote. Raises ValueError if there is none."""
    if sample.completion is None:
        raise ValueError(f"task {sample.task.id!r} has no completion, which this reward scores; it is for policies that write text")
    return sample.completion


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


def close(part: object) -> None:
    """Close connections and threads of a reward or its client, if it has any."""
    if isinstance(part, _Closable):
        part.close()
