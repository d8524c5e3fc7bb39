"""Held-out evaluation: deterministic sampling with fixed seeds, scoring, and tables by tag with confidence intervals."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.distributed.ranks import Ranks
from retouch.objectives.base import Objective
from retouch.protocols import Renderer
from retouch.rewards.judging import BatchScorer
from retouch.training.completions import completion_texts
from retouch.training.loop import wait_for_rewards
from retouch.types import Batch, Sample, Scores, Task

# Keys the noise of evaluations. Training steps count from 0, so they never use this key.
EVALUATION_STEP = -1
MOST_TAG_VALUES = 8


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationResult:
    """Scores and rewards (n,) of the held-out tasks in their order, NaN if missing.

    ``images`` and ``texts``: the images of the first few tasks, and the completions they were made from (None: the policy writes
    none). ``shares``: columns of 1 (yes), 0 (no) and 0.5 (undecided).
    """

    tasks: Sequence[Task]
    scores: Scores
    rewards: Tensor
    images: Sequence[Image | None] = field(default_factory=tuple)
    texts: Sequence[str | None] = field(default_factory=tuple)
    shares: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Every score by task, as stored in the run's folder."""
        return {
            **({"shares": list(self.shares)} if self.shares else {}),
            "tasks": [task.id for task in self.tasks],
            "rewards": self.rewards.tolist(),
            "scores": {name: column.tolist() for name, column in self.scores.items()},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any], tasks: Sequence[Task]) -> "EvaluationResult":
        """The inverse of ``to_json``, for the same tasks. Raises ValueError if the tasks have changed."""
        if [task.id for task in tasks] != record["tasks"]:
            raise ValueError("the held-out tasks differ from those at the start of the run; start a new run with --fresh")
        scores = {name: _column(values) for name, values in record["scores"].items()}
        return cls(tasks, scores, _column(record["rewards"]), shares=tuple(record.get("shares", ())))


def _column(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates a policy on ``tasks``, which are divided among the ranks.

    ``seed`` keys the initial noise. ``batch``: rows per batch. ``pictures``: the number of images to return. ``demonstrates``:
    whether the policy can demonstrate the task, because it has a target. ``scores_images``: whether there is a reward; without one
    only the images to return are made. ``objective``: adds what it measures of the tasks itself.
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
    objective: Objective | None = None

    @property
    def measured(self) -> Mapping[str, str]:
        """The columns that the objective measures, as its ``heldout_columns``."""
        return {} if self.objective is None else self.objective.heldout_columns

    def __call__(self, policy: Any) -> EvaluationResult:
        """Score the policy as a user would run it."""
        result = self._evaluate(policy.sample, slot=0) if self.scores_images else self._unscored(policy.sample)
        if self.objective is None:
            return result
        shares = tuple(name for name, kind in self.measured.items() if kind == "share")
        return replace(result, scores=result.scores | self._measure(policy, self.objective), shares=shares)

    def ceiling(self, policy: Any) -> EvaluationResult | None:
        """Score the tasks' own targets or completions after rendering; None if a task has none.

        A denoising policy cannot exceed the score of its targets. A writer may find better completions than those of the tasks.
        """
        if not all(self.demonstrates(task) for task in self.tasks):
            return None
        return self._evaluate(policy.demonstrate, slot=0)

    def best_of(self, policy: Any, *, k: int) -> EvaluationResult:
        """The best of ``k`` samples per task, separately for each column; a sample without a score is never the best.

        A denoising policy starts from new noise each time. A writer samples its tokens, because its most likely tokens are always
        the same.
        """
        act = policy.rollout if policy.sampling.writes_tokens else policy.sample
        results = [self._evaluate(act, slot=slot) for slot in range(k)]
        scores = {name: _best([result.scores[name] for result in results]) for name in results[0].scores}
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
        """The images to return, without scores."""
        samples = [made for batch in self._batches(slots=(0,), most=self.pictures) for made in self._samples(act, batch)]
        return self._result({}, torch.full((len(self.tasks),), torch.nan), samples)

    def _measure(self, policy: Any, objective: Objective) -> Scores:
        """The columns that the objective measures, under the average weights if there are any, as for ``policy.sample``."""
        with policy.copies.using("average") if "average" in policy.copies.copies else nullcontext():
            parts = [objective.measure(policy, batch) for batch in self._batches(slots=(0, 1))]
        columns = self._gathered([torch.cat([part[name].cpu() for part in parts]) for name in self.measured])
        return dict(zip(self.measured, columns, strict=True))

    def _batches(self, *, slots: Sequence[int], most: int | None = None) -> Iterator[Batch]:
        """This rank's tasks, or the first ``most`` of them, a row for each slot. All ranks have equally many."""
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
        """The columns of this rank's tasks, over all ranks and in the order of ``tasks``."""
        return self.ranks.gather(torch.stack(list(columns), dim=1))[: len(self.tasks)].unbind(dim=1)

    def _result(self, scores: Scores, rewards: Tensor, samples: Sequence[Sample]) -> EvaluationResult:
        shown = samples[: self.pictures]
        return EvaluationResult(self.tasks, scores, rewards, [each.image for each in shown], [each.completion for each in shown])


def _best(columns: Sequence[Tensor]) -> Tensor:
    best = torch.stack(list(columns)).nan_to_num(nan=-math.inf).amax(dim=0)
    return torch.where(best.isinf(), torch.nan, best)


Row = dict[str, float | int]


def score_table(
    evaluated: EvaluationResult, headline: Tensor | None = None
) -> tuple[dict[str, Row], dict[str, dict[str, tuple[float, float]]]]:
    """Column means by row, and their 95 % confidence intervals where a row has more than one score.

    The rows are ``all``; ``headline``, the tasks for which ``headline`` (n,) is True, unless these are all; and ``tag=value`` for
    each tag with few values.
    """
    means: dict[str, Row] = {}
    intervals: dict[str, dict[str, tuple[float, float]]] = {}
    columns = {"reward": evaluated.rewards, **evaluated.scores}
    groups = _groups(evaluated.tasks)
    if headline is not None and not headline.all():
        groups = {"all": groups.pop("all"), "headline": headline.nonzero().flatten().tolist(), **groups}
    for name, rows in groups.items():
        means[name] = {"n": len(rows)}
        intervals[name] = {}
        for column, values in columns.items():
            known = values[rows][~values[rows].isnan()].double()
            if len(known):
                means[name][column] = known.mean().item()
            if len(known) > 1:
                interval = _share_interval if column in evaluated.shares else _interval
                intervals[name][column] = interval(known)
    return means, intervals


def headline_tasks(tasks: Sequence[Task], headline: Mapping[str, Sequence[str]] | None) -> Tensor:
    """A mask (n,) of the tasks that the summary is about: all of them, or those with one of the given values for every given tag.

    Raises ValueError if there is no such task.
    """
    tags = headline or {}
    mask = torch.tensor([all(task.tags.get(tag) in values for tag, values in tags.items()) for task in tasks])
    if not mask.any():
        raise ValueError(f"eval.headline: no held-out task has {dict(tags)}")
    return mask


def paired_gain(before: Tensor, after: Tensor) -> tuple[float, tuple[float, float] | None]:
    """The mean of after - before over tasks scored both times, and its 95 % interval (normal approximation, paired).

    The interval is None for a single task.
    """
    difference = (after - before).double()
    difference = difference[~difference.isnan()]
    return difference.mean().item(), _interval(difference) if len(difference) > 1 else None


def _interval(values: Tensor) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of (n,) values, n > 1, by the normal approximation."""
    mean, half = values.mean().item(), 1.96 * values.std().item() / math.sqrt(len(values))
    return mean - half, mean + half


def _share_interval(values: Tensor) -> tuple[float, float]:
    """The 95 % confidence interval of a share, from (n,) values between 0 and 1 (Wilson 1927, score interval)."""
    share, count, square = values.mean().item(), len(values), 1.96**2
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = 1.96 / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return middle - half, middle + half


def _groups(tasks: Sequence[Task]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {"all": list(range(len(tasks)))}
    for tag in sorted({tag for task in tasks for tag in task.tags}):
        values = sorted({task.tags[tag] for task in tasks if tag in task.tags})
        if len(values) <= MOST_TAG_VALUES:
            for value in values:
                groups[f"{tag}={value}"] = [row for row, task in enumerate(tasks) if task.tags.get(tag) == value]
    return groups
