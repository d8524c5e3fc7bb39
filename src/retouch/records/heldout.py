"""The stored scores of single held-out tasks, and the change between two evaluations of the same tasks."""

import math
from collections.abc import Mapping
from typing import Any

from retouch.core.intervals import MeanEstimate, estimate_mean
from retouch.records import files, shapes
from retouch.records.folder import RunFolder


def read_scores(folder: RunFolder, step: int) -> dict[str, dict[str, float]]:
    """Read an evaluation: by column, the score of each task by id, without missing scores. "reward" is the combined reward.

    Empty if the scores of this evaluation are not stored.
    """
    path = folder.evaluation(step)
    if not path.exists():
        return {}
    record = files.read_record(path, shapes.SCORES)
    columns = {"reward": record["rewards"], **{name: values for name, values in record["scores"].items() if name != "reward"}}
    return {
        name: {task: value for task, value in zip(record["tasks"], values, strict=True) if _is_known(value)}
        for name, values in columns.items()
    }


def read_sources(folder: RunFolder, step: int) -> dict[str, str]:
    """Read the source of each task of an evaluation, by task id. Empty if no tasks share a source."""
    path = folder.evaluation(step)
    record: Mapping[str, Any] = files.read_record(path, shapes.SCORES) if path.exists() else {}
    return dict(zip(record["tasks"], record["sources"], strict=True)) if "sources" in record else {}


def paired_change(before: Mapping[str, float], after: Mapping[str, float], sources: Mapping[str, str]) -> MeanEstimate:
    """Estimate the mean of after - before over the tasks that have both scores. ``sources``: the sources of tasks, by task id; a
    task without one has a source of its own."""
    both = [task for task in before if task in after]
    return estimate_mean([after[task] - before[task] for task in both], [sources.get(task, "") for task in both])


def _is_known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)
