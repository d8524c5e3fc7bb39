"""A reward function for TRL's GRPOTrainer: completions are drawn by any of Retouch's renderers and judged by any of its rewards.

TRL owns the policy, its sampling and its update. It calls a reward function with lists, one entry a row: ``completion_ids`` as they
were sampled, ``completions`` as text, and the data set's columns; rows of a group are those of one task.
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
from retouch.rewards.judging import Judge, ScoredBatch
from retouch.training.loop import TooManyMissing
from retouch.types import Completion, Sample, Task

NOT_COLUMNS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")


@dataclass(frozen=True, slots=True, eq=False)
class _Completions:
    """As much of a trajectory as a renderer of completions reads."""

    outputs: tuple[Completion, ...]


class PictureReward:
    """Draws and judges completions: a float for each, None where it could not be judged (TRL leaves such a row out).

    ``writer``: the adapter of the model that TRL trains; it knows what ends a completion, and the text of ids. A picture is made of
    the ids; TRL's text is not read, for tokenised again it may be other ids. ``combine``: the reward's columns that train.
    ``task``: the task of a row, from the row's columns; rows of a group give tasks of one ``id``, by which the noise of their
    pictures is keyed too, with ``seed`` and the optimizer's step. ``max_missing``: the largest share of missing scores, over all
    ranks, before TooManyMissing ends the training on every one of them.

    A completion that cannot be drawn is the policy's own fault and has the declared minimum of every column. Means of the columns,
    and the shares of missing scores and faults, go to the trainer's metrics. ValueError as ``Judge`` raises it, or from ``task``.
    """

    __name__ = "retouch"  # what TRL calls it in its metrics

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
        self.judge = Judge(reward, combine)
        self.task = task
        self.seed = seed
        self.max_missing = max_missing

    def __call__(self, *, completion_ids: Sequence[Sequence[int]], **given: Any) -> list[float | None]:
        """The rewards of TRL's rows, in order."""
        ranks, state = _ranks(), given.get("trainer_state")
        step = 0 if state is None else int(state.global_step)
        tasks = self._tasks({name: values for name, values in given.items() if name not in NOT_COLUMNS}, len(completion_ids))
        first = ranks.rank * len(tasks)
        rows = enumerate(zip(completion_ids, tasks, strict=True))
        outputs = tuple(self._written(ids, key=(self.seed, step, _number(task.id), first + row)) for row, (ids, task) in rows)
        images = self.renderer(tasks, _Completions(outputs))
        judged = self.judge([Sample(task, image, out.text) for task, image, out in zip(tasks, images, outputs, strict=True)])
        self._account(judged, ranks, given.get("log_metric"))
        return [None if reward != reward else reward for reward in judged.rewards.tolist()]

    def _tasks(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[Task]:
        """Each row's task; one object a task, so that its pictures and prompt are prepared once."""
        known: dict[str, Task] = {}
        made = [self.task({name: values[row] for name, values in columns.items()}) for row in range(rows)]
        return [known.setdefault(task.id, task) for task in made]

    def _written(self, ids: Sequence[int], *, key: tuple[int, int, int, int]) -> Completion:
        ended = not ids or ids[-1] in self.writer.stop
        said = tuple(ids[:-1] if ended else ids)
        return Completion(said, self.writer.decode(said), not ended, key)

    def _account(self, judged: ScoredBatch, ranks: Ranks, log_metric: Callable[[str, float], None] | None) -> None:
        """Metrics of these rows; TooManyMissing on every rank where it holds over all."""
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
                f"{lost / rows:.0%} of the samples could not be judged, and max_missing allows {self.max_missing:.0%}: the judge "
                "is failing. Go on from the last checkpoint when it answers"
            )


def _ranks() -> Ranks:
    """The ranks of the trainer, which has joined them."""
    if not dist.is_initialized():
        return Ranks()
    state = PartialState()
    return Ranks(rank=state.process_index, world=state.num_processes, device=state.device)


def _number(task: str) -> int:
    """The same number for a task on every rank: TRL spreads the rows of a group over them and does not number groups."""
    return int.from_bytes(hashlib.sha256(task.encode()).digest()[:7], "big")
