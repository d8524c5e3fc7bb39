"""The contracts of a data source (it builds the same tasks each time, says what they contain, and holds out other images), and of a
reward (it returns its declared columns, one score per sample, and NaN if it cannot score)."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from PIL import Image
from pydantic import TypeAdapter

from retouch.config import consent
from retouch.core.random import generator
from retouch.data.base import DataContext, DataSource
from retouch.data.kinds import DATA
from retouch.data.tasks import examples
from retouch.protocols import Reward
from retouch.rewards.function import FunctionReward, RewardFunction
from retouch.rewards.scoring import ask
from retouch.types import Sample, Scores, Task
from retouch_worlds.testing.assertions import call_twice, require, require_close

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

        >>> from retouch.data.sources.folder import PromptData
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


def _bytes(image: Image.Image) -> str:
    return hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()


SAME = 1e-5


def check_reward(reward: Reward | RewardFunction, samples: Sequence[Sample]) -> None:
    """Raises AssertionError if ``reward`` violates the contract on ``samples``; give three or more, all with an image.

    ``reward``: an object with ``columns`` and ``__call__(samples)``, or a reward function (``retouch.reward``).

    - It returns exactly the declared columns, each (b,) in a floating-point dtype, within its range or NaN.
    - Permuting the samples permutes the scores (up to 1e-5 of the largest), and nothing is drawn from torch's global generator.
    - Unusual images (one pixel, all black, very wide, another mode) give a score or NaN and raise no error.

    Example::

        >>> from retouch.types import Sample, Task
        >>> samples = [Sample(Task(str(side), "red"), Image.new("RGB", (side, 8), "red")) for side in (8, 9, 10)]
        >>> retouch.testing.check_reward(retouch.rewards.Share(channel="red").build(device="cpu"), samples)
    """
    if isinstance(reward, type):
        raise AssertionError(f"{reward.__name__} is a class; give an object of it, such as {reward.__name__}()")
    if not isinstance(reward, Reward):
        reward = FunctionReward.of(reward).build(device="cpu")
    require(len(samples) >= 2, "give at least two samples")
    require(all(sample.image is not None for sample in samples), "give samples with an image: a reward is never called without one")
    scores, again = call_twice(lambda: _score(reward, samples, "the samples"), "the reward")
    _check_columns(reward, scores, len(samples))
    for name, column in scores.items():
        require_close(again[name], column, limit=SAME, what=f"column {name!r} scored twice")
    permutation = torch.randperm(len(samples), generator=generator("retouch.testing", "order")).tolist()
    for order in (list(reversed(range(len(samples)))), permutation):
        permuted = _score(reward, [samples[index] for index in order], "the samples in another order")
        for name, column in scores.items():
            require_close(permuted[name], column[order], limit=SAME, what=f"column {name!r} in the order {order}")
    unusual = {
        "an image of one pixel": Image.new("RGB", (1, 1), (200, 30, 90)),
        "a black image": Image.new("RGB", (32, 32)),
        "a very wide image": Image.new("RGB", (160, 2), (9, 200, 120)),
        "a grey image (mode L)": Image.new("L", (24, 24), 77),
    }
    for what, image in unusual.items():
        odd = _score(reward, [replace(samples[0], image=image), samples[1]], what)
        _check_columns(reward, odd, 2)
        for name, column in odd.items():
            require_close(column[1:], scores[name][1:2], limit=SAME, what=f"column {name!r} of a sample in a batch with {what}")


def _check_columns(reward: Reward, scores: Scores, count: int) -> None:
    declared, given = sorted(reward.columns), sorted(scores)
    require(declared == given, f"the reward declares the columns {declared} and returns {given}")
    for name, column in reward.columns.items():
        values = scores[name]
        require(tuple(values.shape) == (count,), f"column {name!r} has shape {tuple(values.shape)} for {count} samples")
        require(values.is_floating_point(), f"column {name!r} is {values.dtype}, which cannot represent NaN")
        outside = values[~values.isnan() & ~((values >= column.low) & (values <= column.high))]
        require(not len(outside), f"column {name!r} gives {outside[:3].tolist()}, outside its range {column.low} to {column.high}")


def _score(reward: Reward, samples: Sequence[Sample], what: str) -> Scores:
    """Score the samples. Raises AssertionError if the reward raises an error; the message names the samples as ``what``."""
    try:
        return ask(reward, samples)
    finally:
        error = sys.exception()
        if isinstance(error, Exception):
            raised = f"{type(error).__name__}: {error}"
            raise AssertionError(
                f"the reward raised an error on {what}; it must return NaN where it cannot score\n{raised}"
            ) from error
