"""Sequences of tasks whose images are decoded on access, the tasks of a step and the rows of each rank, and the held-out split.

The tasks of a step depend only on the step, so resuming needs no state. In the global order of a step's rows, the samples of a task
are contiguous: row ``i * group_size + s`` is sample ``s`` of the step's task ``i``. The rows are split into ``minibatches`` equal
contiguous parts, and each part into equal contiguous shares, one for each rank. So the minibatches do not depend on the number of
ranks. A group may be split over several ranks, but not if the number of tasks of a part is a multiple of the number of ranks.

The side of a source in the split into training and held-out rows depends on a hash of the seed and the name of the source, so new
rows do not move existing ones. All rows that share an image are on the same side.
"""

import hashlib
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeAlias, overload, runtime_checkable

from PIL.Image import Image

from retouch.core.random import permutation
from retouch.data.images import fit, fit_mask, load_image, load_mask, off_centre, removed_by_fit
from retouch.data.rows import Row, Rows
from retouch.types import Batch, Task

_MOST_IN_A_ROW = 100
SMALLEST = 0.4
"""The smallest width and height of a crop, as a share of the width and height of its image."""
_log = logging.getLogger(__name__)


class LoadedTasks(Sequence[Task]):
    """Tasks that are loaded on access; taking a slice loads nothing. ``load``: the task with a number from 0 to ``count - 1``."""

    def __init__(self, count: int, load: Callable[[int], Task]) -> None:
        self._count = count
        self._load = load

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> "Subset": ...

    def __getitem__(self, index: int | slice) -> "Task | Subset":
        if isinstance(index, slice):
            return Subset(self, range(self._count)[index])
        return self._load(range(self._count)[index])


class Subset(LoadedTasks):
    """Some tasks of a sequence, by index, in the given order; indices may repeat."""

    def __init__(self, tasks: Sequence[Task], indices: Sequence[int]) -> None:
        super().__init__(len(indices), lambda place: tasks[indices[place]])


class MappedTasks(LoadedTasks):
    """The tasks of a sequence, each changed by ``change`` on access."""

    def __init__(self, tasks: Sequence[Task], change: Callable[[Task], Task]) -> None:
        super().__init__(len(tasks), lambda index: change(tasks[index]))


@runtime_checkable
class UnindexedTasks(Protocol):
    """Tasks that cannot be indexed, such as the tasks of a stream. ``first``: some of the tasks, as examples."""

    first: Sequence[Task]

    def at_step(self, step: int, *, count: int, places: Sequence[int]) -> Sequence[Task]:
        """The ``count`` tasks of a step; only the tasks at ``places`` need be loaded."""

    def state(self) -> Any:
        """The state that a checkpoint stores, as JSON."""

    def load_state(self, state: Any) -> None:
        """Continue from a stored ``state``."""

    def close(self) -> None:
        """Stop all background processes and threads."""


Drawable: TypeAlias = "Sequence[Task] | UnindexedTasks"


class Tasks(LoadedTasks):
    """The tasks of a data set, decoded on access. The last ``cache`` tasks stay in memory.

    ``resize``: the (width, height) of the source images, the mask and the target; None keeps all sizes. A reference image keeps its
    size. A chosen and a rejected image always get the size of the first source image (or the target, or the chosen image).

    Indexing raises ValueError, with file and line, for an unusable row; ``accept_rows`` finds these rows before training.
    """

    def __init__(self, rows: Rows, *, resize: tuple[int, int] | None, cache: int = 64) -> None:
        self.rows = rows
        self.resize = resize
        super().__init__(len(rows), lru_cache(maxsize=cache)(lambda index: load_task(rows[index], resize=resize)))


def load_task(row: Row, *, resize: tuple[int, int] | None, crop: Callable[[Image], Image] | None = None) -> Task:
    """The task of a row, with its images decoded and resized as in ``Tasks``. ``crop`` is applied to the images before they are
    resized, except to the reference; a task whose whole mask it would remove is not cropped. Raises ValueError, with file and line,
    if an image is unusable, and if resizing would crop the whole mask away."""
    try:
        return _load(row, resize, crop or (lambda image: image))
    except ValueError as error:
        raise ValueError(f"{row.file}:{row.line}: {error}") from error


def _load(row: Row, resize: tuple[int, int] | None, crop: Callable[[Image], Image]) -> Task:
    whole = None if row.mask is None else load_mask(row.mask)
    if whole is not None and any(whole.histogram()[128:]) and not any(crop(whole).histogram()[128:]):
        crop = lambda image: image  # noqa: E731, the crop would remove the whole mask
    images = [crop(load_image(image)) for image in row.images]
    target = None if row.target is None else crop(load_image(row.target))
    reference = None if row.reference is None else load_image(row.reference)
    mask = None if whole is None else crop(whole)
    pair = [None if image is None else crop(load_image(image)) for image in (row.chosen, row.rejected)]
    canvas = images[0] if images else target or pair[0]
    if mask is not None and canvas is not None:
        require_same_size(mask.size, canvas.size)
    if resize is not None and canvas is not None:
        if mask is not None and (reason := removed_by_fit("mask", off_centre(mask), mask.size, size=resize)):
            raise ValueError(reason)
        images = [fit(image, size=resize) for image in images]
        target = None if target is None else fit(target, size=resize)
        mask = None if mask is None else fit_mask(mask, size=resize)
    if canvas is not None:
        pair = [None if image is None else fit(image, size=resize or canvas.size) for image in pair]
    task = Task(
        id=row.id,
        instruction=row.instruction,
        images=tuple(images),
        mask=mask,
        reference=reference,
        target=target,
        text=row.text,
        tags=row.tags,
        meta=row.meta,
        chosen=pair[0],
        rejected=pair[1],
        source=row.source,
    )
    if not row.turns:
        return task
    # One turn for each instruction; the task's own instruction is all of them.
    instructions: list[str] = [row.instruction, *row.meta["later"]]  # type: ignore[misc]
    sentences = [text if text.rstrip()[-1] in ".!?" else f"{text.rstrip()}." for text in instructions]
    turns = (
        replace(task, id=f"{task.id}/turn-{number}", instruction=text, target=None, text=None, chosen=None, rejected=None)
        for number, text in enumerate(instructions, 1)
    )
    return replace(task, instruction=" ".join(sentences) if len(sentences) > 1 else task.instruction, turns=tuple(turns))


class UncheckedTasks(LoadedTasks):
    """Tasks that were not all checked, so that an unusable task may be found only when it is drawn.

    ``on_bad_row``: "refuse" raises ValueError for such a task; "skip" logs it and takes the next usable task instead. The
    replacement depends only on the data.
    """

    def __init__(self, tasks: Sequence[Task], *, on_bad_row: Literal["refuse", "skip"]) -> None:
        super().__init__(len(tasks), self._usable)
        self._tasks = tasks
        self._skip = on_bad_row == "skip"
        self._logged: set[int] = set()

    def _usable(self, index: int) -> Task:
        for place in range(index, index + min(len(self), _MOST_IN_A_ROW)):
            try:
                return self._tasks[place % len(self)]
            except ValueError as error:
                if not self._skip:
                    raise ValueError(
                        f"{error}. This row was not checked before training; fix it, check all rows with data.check: 'all', or "
                        "leave unusable rows out with data.on_bad_row: 'skip'"
                    ) from error
                if place % len(self) not in self._logged:
                    self._logged.add(place % len(self))
                    _log.warning("skipped an unusable row, and took the next one: %s", error)
        raise ValueError(f"{_MOST_IN_A_ROW} successive rows cannot be used; check the data set with `retouch data check`")


def require_same_size(mask: tuple[int, int], image: tuple[int, int]) -> None:
    """Raise ValueError if the sizes, (width, height), of a mask and its image differ."""
    if mask != image:
        raise ValueError(f"the mask is {mask[0]}x{mask[1]} but its image {image[0]}x{image[1]}; they must be equal")


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


def draw(tasks: Drawable, *, seed: int, step: int, count: int, places: Sequence[int]) -> Sequence[Task]:
    """The ``count`` tasks of a step, counted from the first step of the phase. Only the tasks at ``places`` may be indexed."""
    if isinstance(tasks, UnindexedTasks):
        return tasks.at_step(step, count=count, places=places)
    return Subset(tasks, tasks_for_step(seed=seed, step=step, count=count, size=len(tasks)))


def examples(tasks: Drawable) -> Sequence[Task]:
    """All tasks of a sequence, or the first tasks of a stream."""
    return tasks.first if isinstance(tasks, UnindexedTasks) else tasks


def tasks_for_step(*, seed: int, step: int, count: int, size: int) -> list[int]:
    """The row numbers of the ``count`` tasks of a step, each from 0 to ``size - 1``.

    Every pass over the data draws each row once; the order of pass k is keyed by (seed, k). A step at the end of a pass continues
    with the next pass, so it may contain a row twice, as two groups. Raises ValueError if ``count`` or ``size`` is below 1.
    """
    if size < 1 or count < 1:
        raise ValueError(f"{count} tasks a step from {size} rows: both must be at least 1")
    first = step * count
    rows: list[int] = []
    for turn in range(first // size, (first + count - 1) // size + 1):
        order = permutation(size, seed, "tasks", turn)
        start = turn * size
        rows += order[max(first - start, 0) : first + count - start]
    return rows


def further_tasks(*, seed: int, step: int, count: int, size: int, turn: int) -> list[int]:
    """The row numbers of the ``count`` tasks that replace tasks of a step in its refill number ``turn``, from 1.

    They are drawn without replacement over all refills of the step, keyed by (seed, step), from the rows that ``tasks_for_step``
    does not give this step. If these rows are used up, they are drawn again; if there are none, all rows are used.
    """
    own = set(tasks_for_step(seed=seed, step=step, count=count, size=size))
    order = permutation(size, seed, "refill", step)
    others = [row for row in order if row not in own] or order
    first = (turn - 1) * count
    return [others[(first + place) % len(others)] for place in range(count)]


def steps_for_passes(passes: float, *, size: int, count: int) -> int:
    """The number of steps of ``count`` tasks in ``passes`` passes over ``size`` rows, rounded up. Raises ValueError if
    ``passes`` <= 0."""
    if passes <= 0:
        raise ValueError(f"{passes} passes over the data must be above 0")
    return math.ceil(Fraction(str(passes)) * size / count)  # exact in decimal: 0.07 * 100 is above 7 in binary


def global_rows(*, rows: int, minibatches: int, rank: int, world: int) -> list[int]:
    """The row numbers of this rank in the global order of the step's ``rows`` rows, minibatch after minibatch.

    Each rank has ``rows // (minibatches * world)`` rows of a minibatch.
    """
    assert rows % (minibatches * world) == 0, "check_arithmetic has checked this"
    part = rows // minibatches
    share = part // world
    return [m * part + rank * share + i for m in range(minibatches) for i in range(share)]


def places_in_step(*, count: int, group_size: int, minibatches: int, rank: int, world: int) -> list[int]:
    """The numbers of the step's tasks, each from 0 to ``count - 1``, for which this rank makes samples."""
    mine = global_rows(rows=count * group_size, minibatches=minibatches, rank=rank, world=world)
    return sorted({row // group_size for row in mine})


def assign(*, seed: int, step: int, tasks: Sequence[Task], group_size: int, minibatches: int, rank: int, world: int) -> Batch:
    """The rows of this rank in a step with the given ``tasks``. Loads only the tasks of these rows."""
    mine = global_rows(rows=len(tasks) * group_size, minibatches=minibatches, rank=rank, world=world)
    groups = sorted({row // group_size for row in mine})
    place = {group: k for k, group in enumerate(groups)}
    return Batch(
        seed=seed,
        step=step,
        tasks=tuple(tasks[group] for group in groups),
        group_ids=tuple(groups),
        group=tuple(place[row // group_size] for row in mine),
        slot=tuple(row % group_size for row in mine),
    )


def check_arithmetic(*, tasks_per_step: int, group_size: int, minibatches: int, world: int) -> None:
    """Raise ValueError, with valid values nearby, if the rows of a step cannot be divided evenly over minibatches and ranks."""
    given = {"tasks_per_step": tasks_per_step, "group_size": group_size, "minibatches": minibatches, "world": world}
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; use at least 1")
    rows, parts = tasks_per_step * group_size, minibatches * world
    if rows % parts:
        tasks = _multiples(parts // math.gcd(parts, group_size), tasks_per_step)
        groups = _multiples(parts // math.gcd(parts, tasks_per_step), group_size)
        fewer = [str(m) for m in range(1, minibatches + 1) if rows % (m * world) == 0]
        alone = f", or minibatches {' or '.join(fewer)}" if fewer else ""
        raise ValueError(
            f"tasks_per_step * group_size = {rows} rows do not divide over {world} rank{'s' * (world > 1)} in {minibatches} "
            f"minibatch{'es' * (minibatches > 1)}: use tasks_per_step {tasks}, or group_size {groups}{alone}"
        )


def _multiples(unit: int, near: int) -> str:
    """Three successive multiples of ``unit``; the first is the largest one not above ``near``, but at least ``unit``."""
    first = max(near // unit, 1)
    return f"{first * unit}, {(first + 1) * unit} or {(first + 2) * unit}"


@dataclass(frozen=True, slots=True)
class Split:
    """The row numbers of both sides, ascending. Every row is on exactly one side."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


class NothingLeftError(ValueError):
    """``held_out`` leaves no row to train on, or none to hold out."""


def split_by_source(sources: Sequence[str], *, held_out: float | int | Literal["all"], seed: int) -> Split:
    """Split rows by their ``sources``, one for each row. Split before rows are repeated.

    ``held_out``: a float below 1 is the probability that a source is held out, independent of the other sources. A whole number is
    the smallest number of held-out rows: the sources with the lowest hashes are held out, so added rows may replace held-out rows.
    "all" holds out every row.

    Raises NothingLeftError if a side is empty, except for the held-out side with ``held_out`` 0 and the training side with "all".
    """
    if held_out == "all":
        return Split((), tuple(range(len(sources))))
    if held_out < 0 or (isinstance(held_out, float) and held_out >= 1):
        raise ValueError(f"held_out {held_out} must be a share from 0 to below 1, a number of rows, or 'all' to only evaluate")
    # A hash of the seed and the source, as a number in [0, 1).
    digests = {source: hashlib.sha256(f"{seed}/{source}".encode()).digest() for source in set(sources)}
    places = {source: int.from_bytes(digest[:6], "big") / 2**48 for source, digest in digests.items()}
    if isinstance(held_out, float):
        away = {source for source, place in places.items() if place < held_out}
    else:
        away, count, sizes = set[str](), 0, Counter(sources)
        for source in sorted(places, key=lambda source: (places[source], source)):
            if count >= held_out:
                break
            away.add(source)
            count += sizes[source]
    split = Split(
        tuple(row for row, source in enumerate(sources) if source not in away),
        tuple(row for row, source in enumerate(sources) if source in away),
    )
    if not split.train or (held_out and not split.held_out):
        side = "train on" if not split.train else "hold out"
        evaluate = "; to evaluate on every row without training, set held_out: 'all'" if not split.train else ""
        instead = ", or hold out a number of rows in place of a share, as held_out: 1" if len(places) > 1 else " with others"
        raise NothingLeftError(
            f"held_out {held_out} leaves nothing to {side}: the {len(sources)} rows have {len(places)} different source images (or "
            f"prompts), and rows of one stay together; add rows{instead}{evaluate}"
        )
    return split


def grouped(sources: Sequence[str], keys: Sequence[Collection[str]]) -> list[str]:
    """The source of each row, such that rows which share a source or a key have one source: the first of theirs in the order of
    names. ``keys``: those of each row, such as its images."""
    parents = list(range(len(sources)))

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = row = parents[parents[row]]
        return row

    first: dict[tuple[str, str], int] = {}
    for row, source in enumerate(sources):
        for key in (("source", source), *(("key", key) for key in keys[row])):
            parents[root(row)] = root(first.setdefault(key, row))
    names: dict[int, str] = {}
    for row, source in enumerate(sources):
        names[root(row)] = min(source, names.get(root(row), source))
    return [names[root(row)] for row in range(len(sources))]


def limit(indices: Sequence[int], *, n: int, seed: int) -> tuple[int, ...]:
    """``n`` of the indices, drawn without replacement, in their original order; all indices if there are at most ``n``.

    With the same seed, the indices drawn for a smaller ``n`` are a subset of those for a larger ``n``. Raises ValueError if
    ``n`` < 1.
    """
    if n < 1:
        raise ValueError(f"a limit of {n} rows leaves nothing; use at least 1")
    order = permutation(len(indices), seed, "limit")
    return tuple(indices[place] for place in sorted(order[:n]))
