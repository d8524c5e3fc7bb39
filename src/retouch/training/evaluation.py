"""Held-out evaluation: deterministic sampling at fixed seeds, judged, broken down by tags, with intervals."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.distributed.ranks import Ranks
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.protocols import Renderer
from retouch.rewards.judging import JudgeBatch, ScoredBatch
from retouch.training.completions import texts
from retouch.training.loop import wait_for_rewards
from retouch.types import Batch, Sample, Scores, Task

# Training counts its steps from 0, so no training noise is ever keyed like this.
EVALUATION_STEP = -1
MOST_TAG_VALUES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """Scores and rewards (n,) of the held-out tasks, in their order, NaN where missing; of the first few the pictures, and what was
    written for them (None: nothing is).
    """

    tasks: Sequence[Task]
    scores: Scores
    rewards: Tensor
    images: Sequence[Image | None] = field(default_factory=tuple)
    texts: Sequence[str | None] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        """Every score by task, as kept in the run's folder."""
        return {
            "tasks": [task.id for task in self.tasks],
            "rewards": self.rewards.tolist(),
            "scores": {name: column.tolist() for name, column in self.scores.items()},
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any], tasks: Sequence[Task]) -> "Evaluated":
        """What ``to_json`` gave, for the same tasks. ValueError where the tasks have changed."""
        if [task.id for task in tasks] != kept["tasks"]:
            raise ValueError("the held-out tasks are not those that the run began with; start it anew with --fresh")
        scores = {name: _column(values) for name, values in kept["scores"].items()}
        return cls(tasks, scores, _column(kept["rewards"]))


def _column(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Judges a policy on ``tasks``, shared out over the ranks. ``seed`` keys the noise that pictures start from. ``demonstrates``:
    whether the policy can be shown what a task wants.
    """

    tasks: Sequence[Task]
    renderer: Renderer
    judge: JudgeBatch
    ranks: Ranks
    seed: int
    batch: int
    pictures: int = 0
    demonstrates: Callable[[Task], bool] = lambda task: task.target is not None

    def __call__(self, policy: Any) -> Evaluated:
        """The policy as its end user would see it."""
        return self._evaluate(policy.sample, slot=0)

    def ceiling(self, policy: Any) -> Evaluated | None:
        """The tasks' own targets or completions through the renderer; None where a task has none.

        No denoising policy can pass its targets; a writer may find better words than a task's.
        """
        if not all(self.demonstrates(task) for task in self.tasks):
            return None
        return self._evaluate(policy.demonstrate, slot=0)

    def best_of(self, policy: Any, *, k: int) -> Evaluated:
        """The best of ``k`` samples of each task, column by column; a sample that could not be judged is never the best.

        A denoising policy starts from other noise each time; a writer draws its words, of which the likeliest are always the same.
        """
        act = policy.rollout if isinstance(policy, AutoregressivePolicy) else policy.sample
        tries = [self._evaluate(act, slot=slot) for slot in range(k)]
        scores = {name: _best([each.scores[name] for each in tries]) for name in tries[0].scores}
        return Evaluated(self.tasks, scores, _best([each.rewards for each in tries]))

    def _evaluate(self, act: Any, *, slot: int) -> Evaluated:
        count = len(self.tasks)
        share = math.ceil(count / self.ranks.world)
        mine = [min(index, count - 1) for index in range(self.ranks.rank * share, (self.ranks.rank + 1) * share)]
        waiting, images = [], []
        written: list[str | None] = []
        for first in range(0, share, self.batch):
            asked, drawn, said = self._judge(act, mine[first : first + self.batch], slot)
            waiting.append(asked)
            images += drawn
            written += said
        judged = wait_for_rewards(self.ranks, waiting)
        table = self.ranks.gather(torch.stack([judged.rewards, *judged.scores.values()], dim=1))[:count]
        scores = dict(zip(judged.scores, table[:, 1:].unbind(dim=1), strict=True))
        return Evaluated(self.tasks, scores, table[:, 0], images[: self.pictures], written[: self.pictures])

    def _judge(
        self, act: Any, indices: Sequence[int], slot: int
    ) -> "tuple[Future[ScoredBatch], list[Image | None], Sequence[str | None]]":
        tasks = tuple(self.tasks[index] for index in indices)
        rows = tuple(range(len(indices)))
        batch = Batch(
            seed=self.seed, step=EVALUATION_STEP, tasks=tasks, group_ids=tuple(indices), group=rows, slot=(slot,) * len(rows)
        )
        trajectory = act(batch)
        images = self.renderer(tasks, trajectory)
        written = texts(trajectory)
        return self.judge(batch, [Sample(*made) for made in zip(tasks, images, written, strict=True)]), images, written


def _best(tries: Sequence[Tensor]) -> Tensor:
    best = torch.stack(list(tries)).nan_to_num(nan=-math.inf).amax(dim=0)
    return torch.where(best.isinf(), torch.nan, best)


Row = dict[str, float | int]


def table(evaluated: Evaluated, kept: Tensor | None = None) -> tuple[dict[str, Row], dict[str, dict[str, tuple[float, float]]]]:
    """Column means by row, and their 95 % intervals, which one value does not have.

    Rows: ``all``; ``headline``, the ``kept`` tasks (n,) bool, where these are not all; ``tag=value`` for tags of few values.
    """
    means: dict[str, Row] = {}
    intervals: dict[str, dict[str, tuple[float, float]]] = {}
    columns = {"reward": evaluated.rewards, **evaluated.scores}
    groups = _groups(evaluated.tasks)
    if kept is not None and not kept.all():
        groups = {"all": groups.pop("all"), "headline": kept.nonzero().flatten().tolist(), **groups}
    for name, rows in groups.items():
        means[name] = {"n": len(rows)}
        intervals[name] = {}
        for column, values in columns.items():
            known = values[rows][~values[rows].isnan()].double()
            if len(known):
                means[name][column] = known.mean().item()
            if len(known) > 1:
                intervals[name][column] = _interval(known)
    return means, intervals


def chosen(tasks: Sequence[Task], headline: Mapping[str, Sequence[str]] | None) -> Tensor:
    """Which tasks (n,) bool the summary speaks of: all, or those with one of the given values for every given tag.

    ValueError where no task is left.
    """
    wanted = headline or {}
    kept = torch.tensor([all(task.tags.get(tag) in values for tag, values in wanted.items()) for task in tasks])
    if not kept.any():
        raise ValueError(f"eval.headline: no held-out task has {dict(wanted)}")
    return kept


def paired_gain(before: Tensor, after: Tensor) -> tuple[float, tuple[float, float] | None]:
    """Mean of after - before over tasks judged both times, and its 95 % interval (normal, paired); None for a single task."""
    difference = (after - before).double()
    difference = difference[~difference.isnan()]
    return difference.mean().item(), _interval(difference) if len(difference) > 1 else None


def _interval(values: Tensor) -> tuple[float, float]:
    """The 95 % interval of the mean of (n,) values, n > 1, by the normal distribution."""
    mean, half = values.mean().item(), 1.96 * values.std().item() / math.sqrt(len(values))
    return mean - half, mean + half


def _groups(tasks: Sequence[Task]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {"all": list(range(len(tasks)))}
    for tag in sorted({tag for task in tasks for tag in task.tags}):
        values = sorted({task.tags[tag] for task in tasks if tag in task.tags})
        if len(values) <= MOST_TAG_VALUES:
            for value in values:
                groups[f"{tag}={value}"] = [row for row, task in enumerate(tasks) if task.tags.get(tag) == value]
    return groups
