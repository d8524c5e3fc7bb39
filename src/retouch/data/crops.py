"""Random crops of training images, so that a model sees more layouts when there are few photographs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL.Image import Image

from retouch.data.sampler import LoadedTasks
from retouch.data.tasks import Tasks, load_task
from retouch.types import Task

SMALLEST = 0.4
"""The smallest width and height of a crop, as a share of the width and height of its image."""


@dataclass(frozen=True, slots=True)
class Crop:
    """A rectangle with the aspect ratio of its image. ``left``, ``top`` and ``size`` (its width and height) are shares of the width
    or the height of the image, so that images of other sizes are cropped alike."""

    left: float
    top: float
    size: float

    def of(self, image: Image) -> Image:
        """The part of the image in the rectangle, at least one pixel wide and high."""
        left, top = round(self.left * image.width), round(self.top * image.height)
        width, height = max(1, round(self.size * image.width)), max(1, round(self.size * image.height))
        left, top = min(left, image.width - width), min(top, image.height - height)
        return image.crop((left, top, left + width, top + height))


def random_crop(seed: int, row: str, number: int) -> Crop:
    """The crop with this number of a row. It depends on nothing else than the arguments."""
    drawn = random.Random(f"{seed} {row} {number}")
    size = drawn.uniform(SMALLEST, 1.0)
    return Crop(left=drawn.uniform(0.0, 1.0 - size), top=drawn.uniform(0.0, 1.0 - size), size=size)


class CroppedTasks(LoadedTasks):
    """For each of the tasks at ``indices``, ``count`` tasks: the task itself, and then tasks with random crops of its images.

    The source images, the mask, the target and a pair of chosen and rejected images of a task are cropped alike; the reference is
    not cropped. The tasks of one crop number follow each other. A cropped task has the id of its row and the number of the crop.
    """

    def __init__(self, tasks: Tasks, indices: Sequence[int], *, count: int, seed: int) -> None:
        self._tasks = tasks
        self._indices = indices
        self._count = count
        self._seed = seed

    def __len__(self) -> int:
        return len(self._indices) * self._count

    def load(self, index: int) -> Task:
        number, place = divmod(index, len(self._indices))
        if number == 0:
            return self._tasks[self._indices[place]]
        row = self._tasks.rows[self._indices[place]]
        crop = random_crop(self._seed, row.id, number)
        task = load_task(row, resize=self._tasks.resize, crop=crop.of)
        return replace(task, id=f"{task.id}#crop{number}")
