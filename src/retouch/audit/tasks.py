"""The task of each sample of a run, from the recipe and the data of the run. Loads no model."""

from collections.abc import Sequence
from functools import cache

from retouch.assembly.phases import sets_of, steps_of
from retouch.audit.ledger_view import LedgerSample
from retouch.data.sampler import draw
from retouch.recipe.recipe import Recipe
from retouch.rewards.ledger.database import encode_text
from retouch.types import Codes, Task


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
        tasks = self._drawn(sample.step - 1) if sample.split == "train" else self._sets[0].heldout
        task = tasks[sample.group]
        if encode_text(task.id) != sample.task:
            raise ValueError(f"the data has the task {task.id!r} where the run scored {sample.task!r}; use the data of the run")
        if Codes.SOURCE in task.meta and not task.images:
            raise ValueError(
                f"the source image of the task {task.id!r} is given only as tokens, and no model is loaded to decode them; prepare "
                "the data with `retouch data tokenize --pictures` to score it again"
            )
        return task

    def _draw(self, step: int) -> Sequence[Task]:
        """The tasks of a step."""
        phase = next(number for number, steps in enumerate(self._steps) if step in steps)
        count, first = self._phases[phase].tasks_per_step, self._steps[phase].start
        tasks = self._sets[phase].train
        return draw(tasks, seed=self._recipe.seed, step=step - first, count=count, places=range(count))
