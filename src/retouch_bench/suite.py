"""The base class of all suites. A suite is one class: its fields are options, and its class attributes describe the publication.

The rest of the package generates the images of the items, scores them with the reward of the suite, and aggregates the scores with
the published formula. So a suite needs no code for models, clients of judges, ledgers, ranks or intervals.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from retouch.config.section import Section
from retouch.data.images import load_image, load_mask
from retouch.rewards.base import RewardSection
from retouch.types import Column, Json, Task
from retouch_judge.models import JudgeModel

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy import ndarray
    from PIL.Image import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteItem:
    """One item of a suite: a prompt for an image, or an instruction for a source image.

    ``id``: unique in the suite; also the name of its image files. ``later``: the instructions of later turns; each edits the image
    of the previous turn. ``category``: its row in the table of results. ``source``, ``mask``, ``reference``, ``target``: image
    files. ``text``: the text that the image should contain. ``cluster``: the id of the source image; items with the same source
    image are resampled together. Empty if the item shares no image. ``fields``: other published columns, as JSON.
    """

    id: str
    prompt: str
    later: tuple[str, ...] = ()
    category: str = ""
    source: Path | None = None
    mask: Path | None = None
    reference: Path | None = None
    target: Path | None = None
    text: str | None = None
    cluster: str = ""
    fields: Mapping[str, Json] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """The number of turns; each turn produces an image."""
        return 1 + len(self.later)

    def instruction(self, turn: int) -> str:
        """Return the prompt or instruction of a turn, counted from 0."""
        return self.prompt if turn == 0 else self.later[turn - 1]


@dataclass(frozen=True, slots=True)
class BrokenItem:
    """A row of a suite's data that cannot be used. ``id``: the item's id, or its file and line. ``reason``: what is wrong."""

    id: str
    reason: str


Scored: TypeAlias = "Mapping[str, float] | str"
"""The scores of an image by column (NaN: missing), or the reason why it has none."""


class Suite(Section):
    """A published benchmark. Derived classes set the class attributes and define ``items``, ``reward`` and ``columns``.

    Example of a user-defined suite::

        class TwoPrompts(Suite):
            name = "two-prompts"
            title = "Two prompts"
            source, licence, size = "https://example.org", "MIT", 2
            protocol = "One image of each prompt; the mean CLIP score."
            task = "text-to-image"
            columns = {"clip": Column(0.0, 1.0)}

            def items(self, data):
                return [SuiteItem(id=prompt, prompt=prompt) for prompt in ("a cat", "a dog")], []

            def reward(self, judge):
                return retouch.rewards.Clip(path="openai/clip-vit-large-patch14")
    """

    name: ClassVar[str]
    """The name of the suite on the command line."""
    title: ClassVar[str]
    """The published name of the suite."""
    source: ClassVar[str]
    """URL of the paper or repository."""
    licence: ClassVar[str]
    """Licence of the data."""
    size: ClassVar[int]
    """Number of published items; 0 if the user provides the prompt file or data set."""
    protocol: ClassVar[str]
    """How images are generated, judged and averaged, in a few sentences."""
    deviations: ClassVar[tuple[str, ...]] = ()
    """The known differences from the published implementation, a sentence each."""
    task: ClassVar[Literal["text-to-image", "editing"]]
    """What a model must be able to do."""
    turns: ClassVar[int] = 1
    """Maximum number of turns of an item. If it is above 1, the edited image is the source of the next turn."""
    images_per_item: ClassVar[int] = 1
    """Number of images per item, generated from different noise."""
    needs_data: ClassVar[bool] = True
    """Whether the user must give the data, because the package does not contain them."""
    columns: ClassVar[Mapping[str, Column]]
    """The scores of one image, with their ranges."""
    headline_column: ClassVar[str]
    """The column of the headline number: one of ``columns``, or a name that ``headline`` adds."""
    average: ClassVar[Literal["items", "categories"]] = "items"
    """``items``: a column's headline is its mean over items; ``categories``: the mean of the categories' means."""

    @abstractmethod
    def items(self, data: Path | None) -> tuple[list[SuiteItem], list[BrokenItem]]:
        """Return the items in the published order, and the rows of the data that cannot be used.

        ``data``: the folder (or file) of the published data; None if the user gave none. Raises ValueError if the data are missing
        or have another layout; the message says where they are published and what to give.
        """

    @abstractmethod
    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """Return the reward that scores the images. ``judge``: the vision-language model that the user named. Raises ValueError if
        the suite needs a judge and ``judge`` is None."""

    def task_for(self, item: SuiteItem, *, turn: int = 0, previous: Image | None = None) -> Task:
        """Return the task for the model and the reward. Its images are loaded from the files of the item. ``previous``: the image
        of the previous turn, the source of a later turn. Raises ValueError if a file cannot be read."""
        source = previous
        if turn == 0:
            source = None if item.source is None else load_image(item.source)
        return Task(
            id=item.id if turn == 0 else f"{item.id} turn {turn + 1}",
            instruction=item.instruction(turn),
            images=() if source is None else (source,),
            mask=None if item.mask is None else load_mask(item.mask),
            reference=None if item.reference is None else load_image(item.reference),
            target=None if item.target is None else load_image(item.target),
            text=item.text,
            tags={"category": item.category} if item.category else {},
            meta=item.fields,
        )

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        """Compute the suite's columns for one image from ``given``, the columns of the reward. The default copies them by name.

        A missing score is NaN; only the columns that depend on it are also NaN. If the image cannot have scores, return a sentence
        that says why.
        """
        return {name: given[name] for name in self.columns}

    def headline(
        self, items: Sequence[SuiteItem], values: Mapping[str, Float[ndarray, " n"]], weights: Float[ndarray, "b n"]
    ) -> dict[str, Float[ndarray, " b"]]:
        """Compute the published aggregate of every column, for each row of ``weights``; also used for each category of the table.

        ``values``: the mean of each column over the images of an item, NaN without a score. ``weights``: how often each item is
        counted: ones for the result, the counts of a resample for the interval. The aggregate is NaN if no scored item is counted.
        Override this for another formula; it must be vectorised over the rows of ``weights``.
        """
        if self.average == "items":
            return {name: weighted_mean(column, weights) for name, column in values.items()}
        import numpy as np

        categories = np.array([item.category for item in items])
        parts = [weights * (categories == each) for each in sorted(set(categories.tolist()))]
        found = {}
        for name, column in values.items():
            means = np.stack([weighted_mean(column, part) for part in parts])
            known = ~np.isnan(means)
            found[name] = np.where(known.any(0), np.nansum(means, 0) / np.maximum(known.sum(0), 1), np.nan)
        return found


def weighted_mean(values: Float[ndarray, " n"], weights: Float[ndarray, "b n"]) -> Float[ndarray, " b"]:
    """Return the weighted mean of the values that are not NaN, for each row of weights; NaN if all their weights are 0."""
    import numpy as np

    known = ~np.isnan(values)
    total = weights @ known.astype(np.float64)
    mean: Float[ndarray, " b"] = np.where(total > 0, weights @ np.where(known, values, 0.0) / np.where(total > 0, total, 1), np.nan)
    return mean


def require_judge(suite: Suite, judge: JudgeModel | None) -> JudgeModel:
    """Return the judge. Raises ValueError if the user named none."""
    if judge is None:
        raise ValueError(
            f"{suite.name} is scored by a vision-language model: name one with --judge, for example "
            '\'{"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1", "key": null}\''
        )
    return judge
