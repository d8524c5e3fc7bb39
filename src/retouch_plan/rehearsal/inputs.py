"""Made-up inputs of a run besides weights: tasks with everything that the model and the objective need, a judge, and devices."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from PIL.Image import new as new_image

from retouch.data.base import DataSets
from retouch.models.base import MEGAPIXEL, TaskInputs
from retouch.models.language import PretrainedLanguageModel
from retouch.recipe.checks import differentiated_rewards
from retouch.recipe.recipe import Recipe
from retouch.rewards.judging import ScoredBatch
from retouch.types import Batch, Codes, Column, Sample, Task
from retouch_plan.rehearsal.fake.tensors import DEVICE

WORDS = 48
"""Number of words in an instruction."""
_TASKS = 100_000
_STRUCTURE = 64
"""Largest number of tokens of a completion besides image codes and thought."""


@dataclass(frozen=True)
class MadeUpTasks(Sequence[Task]):
    """``size`` tasks of a recipe, all with the same content."""

    recipe: Recipe
    size: int = _TASKS

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(self.size))]
        return replace(self._first, id=f"task-{index % self.size}")

    @cached_property
    def _first(self) -> Task:
        recipe = self.recipe
        takes: TaskInputs | None = getattr(recipe.image_model, "takes", None)
        most = 0 if takes is None else takes.images[1]
        images = any(phase.data.contents().images is not False for phase in recipe.resolved_phases())
        count = max(takes.images[0], min(1, most) * images) if takes is not None else 0
        size: tuple[int, int] = recipe.image_size or getattr(recipe.image_model, "planned_size", None) or MEGAPIXEL
        image = new_image("RGB", size[::-1], (120, 90, 60))
        imitates = any(phase.imitates for phase in recipe.resolved_phases())
        compared = any(part.needs_target for path, section in differentiated_rewards(recipe) for *_, part in section.parts(path))
        return Task(
            id="task-0",
            instruction=" ".join(["word"] * WORDS),
            images=(image,) * count,
            mask=new_image("L", size[::-1], 255) if takes is not None and takes.mask else None,
            reference=image if recipe.policy.train.reads_reference else None,
            target=image if imitates or compared else None,
            text="word",
            meta={**({"completion": " ".join(["word"] * WORDS)} if imitates else {}), **self._codes},
        )

    @property
    def _codes(self) -> dict[str, Any]:
        """The image tokens of a task, if the data set has them, and a thought of the maximum length."""
        model = self.recipe.policy.model
        if not self.recipe.data.contents().tokens or not isinstance(model, PretrainedLanguageModel):
            return {}
        described = model.describe(model.find_weights()[0])
        assert described is not None, "its configuration was written for the rehearsal"
        side = 2 ** (len(described["autoencoder"]["config"]["channel_multiplier"]) - 1)
        height, width = (edge // side for edge in model.planned_size)
        longest = max(getattr(phase.rollout, "longest", 0) for phase in self.recipe.resolved_phases())
        codes = [[0] * width] * height
        thought = " ".join(["word"] * (longest - height * (width + 1) - _STRUCTURE))
        return {Codes.SOURCE: codes, Codes.TARGET: codes, Codes.THOUGHT: thought}


def made_up_sets(recipe: Recipe) -> list[DataSets]:
    """Return made-up tasks for each phase. Their number is fixed, because the size of the data set is not known."""
    tasks = MadeUpTasks(recipe)
    return [DataSets(train=tasks, heldout=tasks[: recipe.eval.tasks]) for _ in recipe.resolved_phases()]


def made_up_judge() -> Any:
    """Return a judge without a model, with the members of ``RewardScorer`` that a run uses. Its scores differ between samples."""
    return SimpleNamespace(
        reward=SimpleNamespace(columns={"made up": Column(0.0, 1.0)}),
        combination=SimpleNamespace(low=0.0, high=1.0, columns=()),
        for_split=lambda *_: scores,
        close=lambda: None,
    )


def scores(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
    """Score samples immediately, like a judge: evenly spaced rewards from 0 to 1."""
    found: Future[ScoredBatch] = Future()
    found.set_result(ScoredBatch({}, torch.linspace(0, 1, len(samples)), 0))
    return found


def fake_devices(recipe: Recipe) -> Recipe:
    """Return the recipe with its GPUs replaced by fake devices of the same indices."""
    if recipe.devices is None:
        return recipe
    names = {part: name.replace("cuda", DEVICE) for part, name in recipe.devices.named.items()}
    return recipe.model_copy(update={"devices": recipe.devices.model_copy(update=names)})
