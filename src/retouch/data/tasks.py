"""Sequences of tasks whose images are decoded and resized on access, and sequences that change the tasks of another sequence."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal

from PIL.Image import Image

from retouch.data.images import Resize, fit, fit_mask, load_image, load_mask, off_centre, removed_by_fit
from retouch.data.rows import Row, Rows
from retouch.data.sampler import LoadedTasks
from retouch.types import Task

_MOST_IN_A_ROW = 100
_log = logging.getLogger(__name__)


class Tasks(LoadedTasks):
    """The tasks of a data set, decoded on access. The last ``cache`` tasks stay in memory.

    ``resize``: None keeps all sizes. Otherwise ``resize`` computes a size from the first source image (without source images from
    the target, or the chosen image); this image, the mask and the target get this size. The size of each further source image is
    computed from that image. A reference image keeps its size. A chosen and a rejected image always get the size of the first
    source image (or the target, or the chosen image).

    Indexing raises ValueError, with file and line, for an unusable row; ``accept`` finds these rows before training.
    """

    def __init__(self, rows: Rows, *, resize: Resize | None, cache: int = 64) -> None:
        self.rows = rows
        self.resize = resize
        self._cached = lru_cache(maxsize=cache)(self._task)

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, index: int) -> Task:
        return self._cached(index)

    def _task(self, index: int) -> Task:
        return load_task(self.rows[index], resize=self.resize)


def load_task(row: Row, *, resize: Resize | None, crop: Callable[[Image], Image] | None = None) -> Task:
    """The task of a row, with its images decoded and resized as in ``Tasks``. ``crop`` is applied to the images before they are
    resized, except to the reference; a task whose whole mask it would remove is not cropped. Raises ValueError, with file and line,
    if an image is unusable, and if resizing would crop the whole mask away."""
    try:
        return _load(row, resize, crop or _whole)
    except ValueError as error:
        raise ValueError(f"{row.file}:{row.line}: {error}") from error


def _whole(image: Image) -> Image:
    return image


def _load(row: Row, resize: Resize | None, crop: Callable[[Image], Image]) -> Task:
    whole = None if row.mask is None else load_mask(row.mask)
    if whole is not None and _has_region(whole) and not _has_region(crop(whole)):
        crop = _whole
    images = [crop(load_image(image)) for image in row.images]
    target = None if row.target is None else crop(load_image(row.target))
    reference = None if row.reference is None else load_image(row.reference)
    mask = None if whole is None else crop(whole)
    pair = [None if image is None else crop(load_image(image)) for image in (row.chosen, row.rejected)]
    canvas = images[0] if images else target or pair[0]
    if mask is not None and canvas is not None:
        require_same_size(mask.size, canvas.size)
    if resize is not None and canvas is not None:
        size = resize.size(canvas.size)
        if mask is not None and (reason := removed_by_fit("mask", off_centre(mask), mask.size, size=size)):
            raise ValueError(reason)
        images = [fit(image, size=size if image is canvas else resize.size(image.size)) for image in images]
        target = None if target is None else fit(target, size=size)
        mask = None if mask is None else fit_mask(mask, size=size)
    if canvas is not None:
        size = canvas.size if resize is None else resize.size(canvas.size)
        pair = [None if image is None else fit(image, size=size) for image in pair]
    return Task(
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


def _has_region(mask: Image) -> bool:
    return any(mask.histogram()[128:])


class UncheckedTasks(LoadedTasks):
    """Tasks that were not all checked, so that an unusable task may be found only when it is drawn.

    ``on_bad_row``: "refuse" raises ValueError for such a task; "skip" logs it and takes the next usable task instead. The
    replacement depends only on the data.
    """

    def __init__(self, tasks: Sequence[Task], *, on_bad_row: Literal["refuse", "skip"]) -> None:
        self._tasks = tasks
        self._skip = on_bad_row == "skip"
        self._logged: set[int] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def load(self, index: int) -> Task:
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


class MappedTasks(LoadedTasks):
    """The tasks of a sequence, each changed by ``change`` on access."""

    def __init__(self, tasks: Sequence[Task], change: Callable[[Task], Task]) -> None:
        self._tasks = tasks
        self._change = change

    def __len__(self) -> int:
        return len(self._tasks)

    def load(self, index: int) -> Task:
        return self._change(self._tasks[index])


def require_same_size(mask: tuple[int, int], image: tuple[int, int]) -> None:
    """Raise ValueError if the sizes, (width, height), of a mask and its image differ."""
    if mask != image:
        raise ValueError(f"the mask is {mask[0]}x{mask[1]} but its image {image[0]}x{image[1]}; they must be equal")
