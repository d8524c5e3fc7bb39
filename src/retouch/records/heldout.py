"""The stored scores of single held-out tasks, and the change between two evaluations of the same tasks."""

import math
from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any, NamedTuple

from retouch.records import files
from retouch.records.folder import RunFolder


class Change(NamedTuple):
    """The mean of after - before, and its 95 % confidence interval (paired, normal approximation); None with a single task."""

    mean: float
    interval: tuple[float, float] | None


def read_scores(folder: RunFolder, step: int) -> dict[str, dict[str, float]]:
    """Read an evaluation: by column, the score of each task by id, without missing scores. "reward" is the combined reward.

    Empty if the scores of this evaluation are not stored.
    """
    path = folder.evaluation(step)
    if not path.exists():
        return {}
    record: Mapping[str, Any] = files.read_json(path)
    columns = {"reward": record["rewards"], **{name: values for name, values in record["scores"].items() if name != "reward"}}
    return {
        name: {task: value for task, value in zip(record["tasks"], values, strict=True) if _is_known(value)}
        for name, values in columns.items()
    }


def paired_change(before: Mapping[str, float], after: Mapping[str, float]) -> Change | None:
    """The change of the tasks that have both scores; None if there is no such task."""
    changes = [after[task] - before[task] for task in before if task in after]
    if not changes:
        return None
    middle = mean(changes)
    if len(changes) == 1:
        return Change(middle, None)
    half = 1.96 * stdev(changes) / math.sqrt(len(changes))
    return Change(middle, (middle - half, middle + half))


def _is_known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
