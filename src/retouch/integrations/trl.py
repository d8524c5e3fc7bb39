"""A reward function for TRL's GRPOTrainer: a renderer of Retouch renders the completions, and a reward scores the images.

TRL runs the policy, its sampling and its updates. It calls a reward function with lists, one entry per row: the sampled
``completion_ids``, the ``completions`` as text, and the columns of the data set. The rows of a group belong to one task.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from retouch.distributed.ranks import Ranks
from retouch.protocols import AutoregressiveModel, Renderer, Reward
from retouch.rewards.combine.combination import Combine
from retouch.rewards.judging import RewardScorer, ScoredBatch
from retouch.run.step import TooManyMissing
from retouch.types import Completion, Sample, Task

NOT_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


@dataclass(frozen=True, slots=True, eq=False)
class _Completions:
    """The part of a trajectory that renderers of completions read."""

    outputs: tuple[Completion, ...]


class RetouchReward:
    """Renders and scores completions. Returns a float for each, or None if it could not be scored (TRL ignores such a row).

    ``writer``: wraps the model that TRL trains; it knows which ids end a completion and how to decode ids. Images are rendered from
    the ids. TRL's text is not used, because encoding it again may give other ids. ``combine``: how the columns are combined into
    the reward. ``task``: makes the task of a row from the row's columns. The rows of a group must give tasks with the same
    ``id``, which also keys the noise of their images, together with ``seed`` and the optimizer step. ``max_missing``: the largest
    allowed fraction of missing scores over all ranks; above it, TooManyMissing stops the training on all ranks.

    A completion that cannot be rendered is the policy's fault and gets the worst value of every column. The means of the columns
    and the fractions of missing scores and faults are logged as metrics of the trainer. Raises the ValueErrors of ``RewardScorer``
    and ``task``."""

    __name__ = "retouch"  # the name in TRL's metrics

    def __init__(
        self,
        writer: AutoregressiveModel,
        renderer: Renderer,
        reward: Reward,
        *,
        combine: Combine,
        task: Callable[[Mapping[str, Any]], Task],
        seed: int = 0,
        max_missing: float = 0.2,
    ) -> None:
        self.writer = writer
        self.renderer = renderer
        self.judge = RewardScorer(reward, combine)
        self.task = task
        self.seed = seed
        self.max_missing = max_missing

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        """Return the rewards of TRL's rows, in order."""
        ranks, state = _ranks(), columns.get("trainer_state")
        step = 0 if state is None else int(state.global_step)
        tasks = self._tasks({name: values for name, values in columns.items() if name not in NOT_COLUMNS}, len(completion_ids))
        first = ranks.rank * len(tasks)
        rows = enumerate(zip(completion_ids, tasks, strict=True))
        outputs = tuple(self._parse(ids, key=(self.seed, step, _number(task.id), first + row)) for row, (ids, task) in rows)
        images = self.renderer(tasks, _Completions(outputs))
        judged = self.judge([Sample(task, image, out.text) for task, image, out in zip(tasks, images, outputs, strict=True)])
        self._log(judged, ranks, columns.get("log_metric"))
        return [None if reward != reward else reward for reward in judged.rewards.tolist()]

    def _tasks(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[Task]:
        """Return the task of each row. Rows of a task share one object, so its images and prompt are prepared once."""
        known: dict[str, Task] = {}
        tasks = [self.task({name: values[row] for name, values in columns.items()}) for row in range(rows)]
        return [known.setdefault(task.id, task) for task in tasks]

    def _parse(self, ids: Sequence[int], *, key: tuple[int, int, int, int]) -> Completion:
        ended = not ids or ids[-1] in self.writer.stop
        tokens = tuple(ids[:-1] if ended else ids)
        return Completion(tokens, self.writer.decode(tokens), not ended, key)

    def _log(self, judged: ScoredBatch, ranks: Ranks, log_metric: Callable[[str, float], None] | None) -> None:
        """Log the metrics of these rows. Raises TooManyMissing on all ranks if too many scores are missing over all ranks."""
        missing = judged.rewards.isnan()
        if log_metric is not None:
            for name, column in judged.scores.items():
                if not column.isnan().all():
                    log_metric(f"reward/{name}", column.nanmean().item())
            log_metric("reward/missing_fraction", missing.float().mean().item())
            log_metric("reward/fault_fraction", judged.faults / len(missing))
        lost, rows = ranks.sum(torch.tensor([float(missing.sum()), float(len(missing))])).tolist()
        if lost > self.max_missing * rows:
            raise TooManyMissing(
                f"{lost / rows:.0%} of the samples have no score, but max_missing allows only {self.max_missing:.0%}: the judge is "
                "failing. Resume from the last checkpoint when the judge works"
            )


def _ranks() -> Ranks:
    """Return the ranks of the trainer, which has already initialised the process group."""
    if not dist.is_initialized():
        return Ranks()
    state = PartialState()
    return Ranks(rank=state.process_index, world=state.num_processes, device=state.device)


def _number(task: str) -> int:
    """Return a number for a task that is equal on all ranks: TRL spreads a group's rows over ranks and does not number groups."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:7], "big")
