"""What a run reads besides weights, made up: tasks with all that their model and objective need, a judge, and devices."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from PIL.Image import Image
from PIL.Image import new as new_image

from retouch.data.base import DataSets
from retouch.distributed.placement import Placement, resolve_device
from retouch.distributed.ranks import Ranks
from retouch.recipe.devices import Devices
from retouch.recipe.recipe import Recipe
from retouch.rehearsal.tensors import DEVICE
from retouch.rewards.judging import ScoredBatch
from retouch.types import Batch, Sample, Task

WORDS = 48
"""Words of an instruction."""
_SIZE = (1024, 1024)
_TASKS = 100_000


@dataclass(frozen=True)
class MadeUpTasks(Sequence[Task]):
    """``count`` tasks of a recipe, all with the same content."""

    recipe: Recipe
    count: int = _TASKS

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(self.count))]
        return replace(self._first, id=f"task-{index % self.count}")

    @cached_property
    def _first(self) -> Task:
        recipe = self.recipe
        takes = getattr(recipe.image_model, "takes", None)
        most = 0 if takes is None else takes.images[1]
        images = any(phase.data.contents().images is not False for phase in recipe.resolved_phases())
        count = max(takes.images[0], min(1, most) * images) if takes is not None else 0
        size = recipe.image_size or _SIZE
        image = new_image("RGB", size[::-1], (120, 90, 60))
        wants_target = any(phase.imitates for phase in recipe.resolved_phases())
        return Task(
            id="task-0",
            instruction=" ".join(["word"] * WORDS),
            images=(image,) * count,
            mask=new_image("L", size[::-1], 255) if takes is not None and takes.mask else None,
            reference=image if recipe.policy.train.reads_reference else None,
            target=image if wants_target else None,
            text="word",
            meta={"completion": " ".join(["word"] * WORDS)} if wants_target else {},
        )


def made_up_sets(recipe: Recipe) -> list[DataSets]:
    """The tasks of each phase. The number of tasks of a data set is not known."""
    tasks = MadeUpTasks(recipe)
    return [DataSets(train=tasks, heldout=tasks[: recipe.eval.tasks]) for _ in recipe.resolved_phases()]


def made_up_judge() -> Any:
    """A judge without a model, whose scores differ from sample to sample (a ``RewardScorer`` as far as a run asks it)."""
    return SimpleNamespace(
        reward=SimpleNamespace(columns={}),
        combination=SimpleNamespace(low=0.0, high=1.0, columns=()),
        for_split=lambda *_: scores,
        close=lambda: None,
    )


def scores(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
    """A judge's answer, at once."""
    found: Future[ScoredBatch] = Future()
    found.set_result(ScoredBatch({}, torch.linspace(0, 1, len(samples)), 0))
    return found


def fake_placement(recipe: Recipe, ranks: Ranks) -> Placement:
    """The recipe's devices; the rank's GPUs are fake devices of the same numbers."""
    devices = recipe.devices or Devices()

    def fake(name: str | None) -> torch.device:
        if name is None:
            return ranks.device
        device = resolve_device(name, devices, local_rank=0)
        return torch.device(DEVICE, device.index or 0) if device.type == "cuda" else device

    copies = {} if devices.reference is None else {"reference": torch.device(devices.reference)}
    return Placement(ranks.device, fake(devices.renderer), fake(devices.reward), devices.offload, copies)


def blank_image(size: tuple[int, int]) -> Image:
    """An image of (height, width) px."""
    return new_image("RGB", size[::-1])
