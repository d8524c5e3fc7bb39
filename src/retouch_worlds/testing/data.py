"""The contract of a data source: it builds the same tasks each time, says what they contain, and holds out other images."""

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated

from PIL.Image import Image
from pydantic import TypeAdapter

from retouch.config import consent
from retouch.data.base import DataContext, DataSource
from retouch.data.kinds import DATA
from retouch.data.sampler import examples
from retouch.types import Task
from retouch_worlds.testing.assertions import require

FIELDS = ("mask", "reference", "target", "text")


def check_data_source(source: DataSource, *, context: DataContext | None = None, tasks: int = 16) -> None:
    """Raises AssertionError if ``source`` violates the contract on the first ``tasks`` tasks of its training and held-out sets.

    ``context``: what a run would pass to the source (default: images keep their size, up to 64 held-out tasks).

    - ``build`` gives training and held-out tasks; both have lengths, are indexed from 0, and are the same when built again.
    - Different training tasks have different ids (a task may be repeated); no held-out task has the id or the source images of a
      training task.
    - Instructions are not empty; images are RGB and masks L, of the size of the first source image (or of the target).
    - Every task has what ``contents`` promises, and nothing that it excludes.
    - The section can be written to a recipe as JSON and read back.

    Example::

        >>> from retouch.data.sources.prompts import PromptData
        >>> retouch.testing.check_data_source(PromptData(path="prompts.txt", held_out=2))
    """
    context = DataContext() if context is None else context
    document = DATA.document(source)
    with consent.reading(document, allow=[type(source).__module__]):  # the caller has imported it
        read = TypeAdapter(Annotated[DataSource, DATA]).validate_json(json.dumps(document))
    require(read == source, f"the section is not the same when its document is read back: {document}")
    first, again = source.build(context), source.build(context)
    require(len(examples(first.train)) > 0, "there are no training tasks")
    require(len(first.heldout) > 0, "there are no held-out tasks")
    train, heldout = (_head(part, tasks) for part in (examples(first.train), first.heldout))
    for part, other in ((train, examples(again.train)), (heldout, again.heldout)):
        require(
            [_digest(task) for task in part] == [_digest(task) for task in _head(other, tasks)], "built again, the tasks differ"
        )
    require(len({task.id for task in train}) == len({_digest(task) for task in train}), "two different training tasks have one id")
    for task in (*train, *heldout):
        _check_task(task, source)
    if context.eval_split != "train":
        shared = {task.id for task in train} & {task.id for task in heldout}
        require(not shared, f"held-out tasks have the ids of training tasks: {sorted(shared)}")
        images = {_bytes(image) for task in train for image in task.images}
        seen = [task.id for task in heldout if any(_bytes(image) in images for image in task.images)]
        require(not seen, f"held-out tasks have the source images of training tasks: {seen}")


def _check_task(task: Task, source: DataSource) -> None:
    require(bool(task.instruction.strip()), f"task {task.id!r} has no instruction")
    images = [*task.images, *(image for image in (task.target, task.reference) if image is not None)]
    require(all(image.mode == "RGB" for image in images), f"task {task.id!r} has an image of another mode than RGB")
    if task.mask is not None:
        require(task.mask.mode == "L", f"task {task.id!r} has a mask of mode {task.mask.mode}, not L")
        canvas = task.images[0] if task.images else task.target
        require(canvas is None or canvas.size == task.mask.size, f"task {task.id!r} has a mask of another size than its image")
    contents = source.contents()
    for field in FIELDS:
        promised, there = getattr(contents, field), getattr(task, field) is not None
        require(promised is None or promised == there, f"task {task.id!r}: contents says {field} {promised}, and it is {there}")
    if not contents.tokens and contents.images is not None:
        require(contents.images == bool(task.images), f"task {task.id!r}: contents says images {contents.images}")


def _head(tasks: Sequence[Task], count: int) -> list[Task]:
    return [tasks[index] for index in range(min(count, len(tasks)))]


def _digest(task: Task) -> str:
    images = [*task.images, task.mask, task.reference, task.target]
    parts = [task.id, task.instruction, repr(task.text), repr(dict(task.tags)), repr(dict(task.meta))]
    return " ".join([*parts, *("-" if image is None else _bytes(image) for image in images)])


def _bytes(image: Image) -> str:
    return hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()
