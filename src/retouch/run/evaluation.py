"""Held-out evaluation: deterministic sampling with fixed seeds, scoring, and tables by tag with confidence intervals."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.core.intervals import cluster_numbers, estimate_mean, estimate_share
from retouch.distributed.ranks import Ranks
from retouch.objectives.base import Objective
from retouch.protocols import Renderer
from retouch.rewards.identity import short
from retouch.rewards.judging import BatchScorer
from retouch.rewards.ledger.database import image_hash
from retouch.run.completions import completion_texts
from retouch.run.step import wait_for_rewards
from retouch.types import Batch, Codes, Sample, Scores, Task

# The step number in the noise key of evaluations. Training steps count from 0, so they never use this key.
EVALUATION_STEP = -1
MOST_TAG_VALUES = 8


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationResult:
    """Scores and rewards (n,) of the held-out tasks, in the order of ``tasks``; NaN for a missing score.

    ``images`` and ``texts``: the images of the first few tasks, and the completions that they were made from (None if the policy
    writes no text). ``shares``: the names of the columns with values 1 (yes), 0 (no) and 0.5 (undecided).
    """

    tasks: Sequence[Task]
    scores: Scores
    rewards: Tensor
    images: Sequence[Image | None] = field(default_factory=tuple)
    texts: Sequence[str | None] = field(default_factory=tuple)
    shares: Sequence[str] = ()

    @property
    def sources(self) -> list[str]:
        """The source of each task."""
        return [task.source for task in self.tasks]

    @property
    def has_shared_sources(self) -> bool:
        """Whether two tasks have the same source."""
        return cluster_numbers(self.sources)[1] < len(self.tasks)

    def to_json(self) -> dict[str, Any]:
        """Return the scores of every task as JSON, as they are stored in the run's folder. ``sources`` are only stored if tasks
        share a source."""
        return {
            **({"shares": list(self.shares)} if self.shares else {}),
            "tasks": [task.id for task in self.tasks],
            "contents": [content_hash(task_content(task)) for task in self.tasks],
            **({"sources": self.sources} if self.has_shared_sources else {}),
            "rewards": self.rewards.tolist(),
            "scores": {name: column.tolist() for name, column in self.scores.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], tasks: Sequence[Task]) -> "EvaluationResult":
        """Read the result of ``to_json``. Raises ValueError if ``tasks`` are not the tasks of the record, by their content, in any
        order. Earlier releases stored only their ids."""
        if "contents" in record:
            then, now = record["contents"], [content_hash(task_content(task)) for task in tasks]
        else:
            then, now = record["tasks"], [task.id for task in tasks]
        if sorted(then) != sorted(now):
            raise ValueError("the held-out tasks differ from those at the start of the run; start a new run with --fresh")
        rows = dict(zip(sorted(range(len(now)), key=now.__getitem__), sorted(range(len(then)), key=then.__getitem__), strict=True))
        order = [rows[place] for place in range(len(now))]
        scores = {name: _column(values)[order] for name, values in record["scores"].items()}
        return cls(tasks, scores, _column(record["rewards"])[order], shares=tuple(record.get("shares", ())))


def task_content(task: Task) -> dict[str, str]:
    """A hash of each field of a task that a model or a judge may see; its id and its source are not part of its content.

    An image is hashed as it was decoded and resized, so another file with the same pixels is the same. Images that a model decodes
    from tokens are left out, because their tokens are in ``meta``.
    """
    images = {} if Codes.SOURCE in task.meta else {f"source image {place}": each for place, each in enumerate(task.images, 1)}
    target = {} if Codes.TARGET in task.meta else {"target": task.target}
    pair = {"chosen image": task.chosen, "rejected image": task.rejected}
    images |= {name: each for name, each in {"mask": task.mask, "reference": task.reference, **target, **pair}.items() if each}
    values = {"instruction": task.instruction, "text": task.text, "tags": dict(task.tags), "columns": dict(task.meta)}
    return {name: image_hash(image)[:16] for name, image in images.items()} | {key: short(each) for key, each in values.items()}


def content_hash(content: Mapping[str, str]) -> str:
    """One hash of the result of ``task_content``."""
    return short(dict(content))


def _column(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a policy on ``tasks``, which are divided among the ranks.

    ``seed``: the key of the initial noise. ``batch``: rows per batch. ``pictures``: the number of images to return.
    ``demonstrates``: whether the policy can demonstrate a task, because the task has a target. ``scores_images``: whether there is
    a reward; without a reward, only the images that are returned are made. ``lower_is_better``: the columns in which a lower score
    is better. ``objective``: adds the columns that the objective measures itself (``heldout_columns``).
    """

    tasks: Sequence[Task]
    renderer: Renderer
    judge: BatchScorer
    ranks: Ranks
    seed: int
    batch: int
    pictures: int = 0
    demonstrates: Callable[[Task], bool] = lambda task: task.target is not None
    scores_images: bool = True
    lower_is_better: Sequence[str] = ()
    objective: Objective | None = None

    @property
    def measured(self) -> Mapping[str, str]:
        """The columns that the objective measures (its ``heldout_columns``); empty without an objective."""
        return {} if self.objective is None else self.objective.heldout_columns

    def __call__(self, policy: Any) -> EvaluationResult:
        """Evaluate the policy on all tasks, sampling as in inference: without exploration."""
        result = self._evaluate(policy.sample, slot=0) if self.scores_images else self._unscored(policy.sample)
        if self.objective is None:
            return result
        shares = tuple(name for name, kind in self.measured.items() if kind == "share")
        return replace(result, scores=result.scores | self._measure(policy, self.objective), shares=shares)

    def ceiling(self, policy: Any) -> EvaluationResult | None:
        """Score the targets or completions that are stored in the tasks, after rendering; None if a task has no target.

        A denoising policy cannot score higher than the targets. A writer may find better completions than those of the tasks.
        """
        if not all(self.demonstrates(task) for task in self.tasks):
            return None
        return self._evaluate(policy.demonstrate, slot=0)

    def best_of(self, policy: Any, *, k: int) -> EvaluationResult:
        """Return the best of ``k`` samples per task, separately for each column; a sample without a score is never the best.

        A denoising policy starts each sample from new noise. A writer samples its tokens, because greedy decoding would give the
        same completion each time.
        """
        act = policy.rollout if policy.sampling.is_autoregressive else policy.sample
        results = [self._evaluate(act, slot=slot) for slot in range(k)]
        scores = {
            name: _best([result.scores[name] for result in results], lower=name in self.lower_is_better)
            for name in results[0].scores
        }
        return EvaluationResult(self.tasks, scores, _best([result.rewards for result in results]))

    def _evaluate(self, act: Any, *, slot: int) -> EvaluationResult:
        futures, samples = [], list[Sample]()
        for batch in self._batches(slots=(slot,)):
            made = self._samples(act, batch)
            futures.append(self.judge(batch, made))
            samples += made[: self.pictures]
        judged = wait_for_rewards(self.ranks, futures)
        rewards, *columns = self._gathered([judged.rewards, *judged.scores.values()])
        return self._result(dict(zip(judged.scores, columns, strict=True)), rewards, samples)

    def _unscored(self, act: Any) -> EvaluationResult:
        """Make only the images that are returned, without scores."""
        samples = [made for batch in self._batches(slots=(0,), most=self.pictures) for made in self._samples(act, batch)]
        return self._result({}, torch.full((len(self.tasks),), torch.nan), samples)

    def _measure(self, policy: Any, objective: Objective) -> Scores:
        """Return the columns that the objective measures, under the average weights if there are any, like ``policy.sample``."""
        with policy.copies.using("average") if "average" in policy.copies.copies else nullcontext():
            parts = [objective.measure(policy, batch) for batch in self._batches(slots=(0, 1))]
        columns = self._gathered([torch.cat([part[name].cpu() for part in parts]) for name in self.measured])
        return dict(zip(self.measured, columns, strict=True))

    def _batches(self, *, slots: Sequence[int], most: int | None = None) -> Iterator[Batch]:
        """Yield this rank's tasks, or the first ``most`` of them, with one row per slot. All ranks get the same number of rows."""
        count = len(self.tasks)
        share = math.ceil(count / self.ranks.world)
        mine = [min(index, count - 1) for index in range(self.ranks.rank * share, (self.ranks.rank + 1) * share)][:most]
        at_once = max(1, self.batch // len(slots))
        for first in range(0, len(mine), at_once):
            indices = tuple(mine[first : first + at_once])
            yield Batch(
                seed=self.seed,
                step=EVALUATION_STEP,
                tasks=tuple(self.tasks[index] for index in indices),
                group_ids=indices,
                group=tuple(row for row in range(len(indices)) for _ in slots),
                slot=tuple(slots) * len(indices),
            )

    def _samples(self, act: Any, batch: Batch) -> list[Sample]:
        trajectory = act(batch)
        images = self.renderer(batch.tasks, trajectory)
        return [Sample(*parts) for parts in zip(batch.tasks, images, completion_texts(trajectory), strict=True)]

    def _gathered(self, columns: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gather the columns of all ranks, in the order of ``tasks``."""
        return self.ranks.gather(torch.stack(list(columns), dim=1))[: len(self.tasks)].unbind(dim=1)

    def _result(self, scores: Scores, rewards: Tensor, samples: Sequence[Sample]) -> EvaluationResult:
        shown = samples[: self.pictures]
        return EvaluationResult(self.tasks, scores, rewards, [each.image for each in shown], [each.completion for each in shown])


def _best(columns: Sequence[Tensor], *, lower: bool = False) -> Tensor:
    sign = -1.0 if lower else 1.0
    best = torch.stack([sign * column for column in columns]).nan_to_num(nan=-math.inf).amax(dim=0)
    return torch.where(best.isinf(), torch.nan, sign * best)


Row = dict[str, float | int]


def score_table(
    evaluated: EvaluationResult, headline: Tensor | None = None
) -> tuple[dict[str, Row], dict[str, dict[str, tuple[float, float]]]]:
    """Return the column means of each row of the table, and their 95 % confidence intervals if scores of two sources are known.

    The rows of the table are: ``all``; ``headline``, the tasks for which ``headline`` (n,) is True (left out if it is all tasks);
    and ``tag=value`` for each value of the tags with at most ``MOST_TAG_VALUES`` values. "reward" is the combined reward, also if a
    column has this name.
    """
    means: dict[str, Row] = {}
    intervals: dict[str, dict[str, tuple[float, float]]] = {}
    columns = {"reward": evaluated.rewards, **{name: values for name, values in evaluated.scores.items() if name != "reward"}}
    groups = _groups(evaluated.tasks)
    if headline is not None and not headline.all():
        groups = {"all": groups.pop("all"), "headline": headline.nonzero().flatten().tolist(), **groups}
    for name, rows in groups.items():
        means[name] = {"n": len(rows)}
        sources = [evaluated.tasks[row].source for row in rows]
        intervals[name] = {}
        for column, values in columns.items():
            known = values[rows][~values[rows].isnan()].double()
            if len(known):
                means[name][column] = known.mean().item()
            interval = _interval(values[rows].tolist(), sources, is_share=column in evaluated.shares)
            if interval is not None:
                intervals[name][column] = interval
    return means, intervals


def headline_tasks(tasks: Sequence[Task], headline: Mapping[str, Sequence[str]] | None) -> Tensor:
    """Return a mask (n,) of the tasks that the summary reports (``eval.headline``).

    These are the tasks that have, for every given tag, one of the given values; all tasks if no tag is given. Raises ValueError if
    there is no such task.
    """
    tags = headline or {}
    mask = torch.tensor([all(task.tags.get(tag) in values for tag, values in tags.items()) for task in tasks])
    if not mask.any():
        raise ValueError(
            f"eval.headline: none of the {len(tasks)} held-out tasks has {dict(tags)}; evaluate on more tasks (eval.tasks), or set "
            "eval.headline to null"
        )
    return mask


def _interval(values: Sequence[float], sources: Sequence[str], *, is_share: bool) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean; None if there are values of fewer than two sources."""
    if not is_share:
        return estimate_mean(values, sources).interval
    found = estimate_share(values, sources)
    return (found.low, found.high) if found.clusters > 1 else None


def _groups(tasks: Sequence[Task]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {"all": list(range(len(tasks)))}
    for tag in sorted({tag for task in tasks for tag in task.tags}):
        values = sorted({task.tags[tag] for task in tasks if tag in task.tags})
        if len(values) <= MOST_TAG_VALUES:
            for value in values:
                groups[f"{tag}={value}"] = [row for row, task in enumerate(tasks) if task.tags.get(tag) == value]
    return groups


log = logging.getLogger("retouch")
