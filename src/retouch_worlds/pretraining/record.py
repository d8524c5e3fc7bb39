"""What all builds of base models share in addition to training: one thread, held-out means, and the record of the build."""

import copy
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from retouch.distributed.ranks import Ranks
from retouch.protocols import Renderer, Reward
from retouch.records import files
from retouch.rewards.judging import RewardScorer
from retouch.run.evaluation import EvaluationResult, Evaluator
from retouch.types import Task

log = logging.getLogger("retouch")


class BuildRecord:
    """The record of a build from ``seed``. ``command``: stored with the scores, if given."""

    def __init__(self, *, seed: int, command: str | None = None) -> None:
        self._origin: dict[str, str | int] = (
            {"seed": seed} if command is None else {"command": f"{command} --seed {seed}", "seed": seed}
        )
        self._began = time.perf_counter()

    def finish(self, scores: Mapping[str, float], *folders: Path) -> None:
        """Write the held-out means, the seed and the command to ``build.json`` in each folder, and log the means."""
        for folder in folders:
            files.write_json(folder / "build.json", {**self._origin, "held_out": scores})
        log.info("built in %.0f s: %s", time.perf_counter() - self._began, ", ".join(map(str, folders)))
        width = max(map(len, scores))
        for name, value in scores.items():
            log.info("  %-*s %.3f", width, name, value)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that the bits do not depend on the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def held_out(
    policy: Any,
    *,
    tasks: Sequence[Task],
    renderer: Renderer,
    reward: Reward,
    column: str,
    demonstrates: Callable[[Task], bool] = lambda task: task.target is not None,
) -> tuple[EvaluationResult, EvaluationResult]:
    """The scores of the targets or completions of the tasks (the ceiling), and the scores of the policy's outputs.

    ``column``: the column of ``reward`` that is used as the reward. All tasks are one batch, and each must have a target or a
    completion.
    """
    evaluate = Evaluator(
        tasks=tasks,
        renderer=renderer,
        judge=RewardScorer(reward, {column: 1.0}).for_split("heldout", 0),
        ranks=Ranks(),
        seed=1,
        batch=len(tasks),
        demonstrates=demonstrates,
    )
    ceiling = evaluate.ceiling(policy)
    assert ceiling is not None
    return ceiling, evaluate(policy)


def write_index(folder: Path, pipeline: str, parts: Mapping[str, tuple[str, str]]) -> None:
    """Write diffusers' ``model_index.json`` into the folder of a pipeline. ``parts``: the library and the class of each part."""
    index = {"_class_name": pipeline, "_diffusers_version": "0.40.0", **parts}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def halved(module: nn.Module) -> Any:
    """A copy of a module in half precision, for saving."""
    return copy.deepcopy(module).half()
