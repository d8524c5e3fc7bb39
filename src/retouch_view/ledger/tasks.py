"""The task of each sample of a run, from the recipe and the data of the run. Loads no model."""

from collections.abc import Sequence
from functools import cache

from retouch.data.sampler import Subset, UnindexedTasks, draw, further_tasks
from retouch.recipe.recipe import Recipe
from retouch.rewards.ledger.database import encode_text
from retouch.run.build import sets_of, steps_of
from retouch.types import Codes, Task
from retouch_view.ledger.ledger_view import LedgerSample


class RunTasks:
    """The tasks of a run. Raises ValueError if the data cannot be found at the path in the recipe.

    A task with a source image as tokens is available only if the data has the image too.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._phases = recipe.resolved_phases()
        self._sets = sets_of(recipe, self._phases, size=recipe.image_size)
        self._steps = steps_of(self._phases, self._sets)
        self._drawn = cache(self._draw)

    def __call__(self, sample: LedgerSample) -> Task:
        """The task of the sample. Raises ValueError if the data has changed since the sample was scored, or has tokens but no
        image."""
        task = self._trained(sample) if sample.split == "train" else self._sets[0].heldout[sample.group]
        if encode_text(task.id) != sample.task:
            raise ValueError(f"the data has the task {task.id!r} where the run scored {sample.task!r}; use the data of the run")
        if Codes.SOURCE in task.meta and not task.images:
            raise ValueError(
                f"the source image of the task {task.id!r} is given only as tokens, and no model is loaded to decode them; prepare "
                "the data with `retouch data tokenize --pictures` to score it again"
            )
        return task

    def _trained(self, sample: LedgerSample) -> Task:
        step = sample.step - 1
        phase = next(number for number, steps in enumerate(self._steps) if step in steps)
        turn, place = divmod(sample.group, self._phases[phase].tasks_per_step)  # as ``training.refill.with_tasks`` numbers groups
        return self._drawn(phase, step, turn)[place]

    def _draw(self, phase: int, step: int, turn: int) -> Sequence[Task]:
        """The tasks of a step, or with ``turn`` above 0 those of a round of ``rollout.refill``."""
        tasks, count = self._sets[phase].train, self._phases[phase].tasks_per_step
        seed, own_step = self._recipe.seed, step - self._steps[phase].start
        if turn == 0:
            return draw(tasks, seed=seed, step=own_step, count=count, places=range(count))
        assert not isinstance(tasks, UnindexedTasks), "rollout.refill refuses streams"
        return Subset(tasks, further_tasks(seed=seed, step=own_step, count=count, size=len(tasks), turn=turn))
