"""The tasks of a run by where their samples stood, from its recipe and its data; no model is loaded."""

from functools import cache

from retouch.assembly.data import sets_of, steps_of
from retouch.audit.opening import Scored
from retouch.data.sampler import tasks_for_step
from retouch.recipe.recipe import Recipe
from retouch.rewards.ledger.database import encode_text
from retouch.types import Codes, Task


class RunTasks:
    """ValueError: the data are not where the recipe says. Tasks that bring tokens can be had where they have pictures too."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._phases = recipe.resolved_phases()
        self._sets = sets_of(recipe, self._phases, size=recipe.image_size)
        self._steps = steps_of(self._phases, self._sets)
        self._drawn = cache(self._draw)

    def __call__(self, sample: Scored) -> Task:
        """ValueError: the data are not what they were when the sample was judged."""
        if sample.split == "train":
            phase, rows = self._drawn(sample.step - 1)
            task = self._sets[phase].train[rows[sample.group]]
        else:
            task = self._sets[0].heldout[sample.group]
        if encode_text(task.id) != sample.task:
            raise ValueError(f"the data have the task {task.id!r} where the run judged {sample.task!r}; they were changed since")
        if Codes.SOURCE in task.meta and not task.images:
            raise ValueError(
                f"the task {task.id!r} brings its picture as tokens, which no model is loaded to decode here; where the data are "
                "tokenized with --pictures they can be looked at again"
            )
        return task

    def _draw(self, step: int) -> tuple[int, list[int]]:
        """The phase of a step, and the rows of its data that the step took."""
        phase = next(number for number, steps in enumerate(self._steps) if step in steps)
        count, size = self._phases[phase].tasks_per_step, len(self._sets[phase].train)
        first = self._steps[phase].start
        return phase, tasks_for_step(seed=self._recipe.seed, step=step - first, count=count, size=size)
