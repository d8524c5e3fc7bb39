"""The playground's exact judge of text-to-image scenes: it knows the requested scene, and compares pixels cell by cell."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from retouch.rewards.base import RewardSection
from retouch.types import Column, Sample, Scores, Task
from retouch_worlds.playground.world.scenes import SIZE, Scene


class SceneReward(RewardSection):
    """The playground's exact judge of text-to-image scenes: it compares the image with the ``scene`` in the task's ``meta``, and
    never reads a writer's prompt.

    The background of the image is the background that fits it best. For each cell that must contain an object, d_object is the
    distance of the image to this object on the image's background; keep(d) = 1 - clip((d - 0.03) / 0.09, 0, 1). ``alignment``, 0 to
    10: 10 x (3 x sum of keep(d_object) + ground) / (3 x (requested objects + extra objects) + 1), where ground is 1 on the
    requested background, else 0, and an extra object is an object in a cell that must be empty. ``quality``, 0 to 10, independent
    of the request: 10 x the mean over the cells of keep of the distance to the nearest template; 0 if no cell shows an object.
    ``overall``, 0 to 10: sqrt(alignment x quality). ``exact``: 1 if the background and the nearest template of every cell are those
    of the scene and quality is at least 7, else 0. Diagnostics: ``shown``, the share of the requested objects that are in their
    cell; ``ground``, as above; ``extra``, the number of extra objects.

    Example::

        >>> from retouch_worlds.data.text_to_image import TextToImageData
        >>> (task,) = TextToImageData(count=1, complexity=[1]).tasks()
        >>> retouch.score(retouch.rewards.Scene(), task.target, meta=task.meta)["exact"]
        1.0
    """

    kind: Literal["playground-scenes"] = "playground-scenes"

    columns: ClassVar[Mapping[str, Column]] = {
        "alignment": Column(0.0, 10.0),
        "quality": Column(0.0, 10.0),
        "overall": Column(0.0, 10.0),
        "exact": Column(0.0, 1.0),
        "shown": Column(0.0, 1.0, diagnostic=True),
        "ground": Column(0.0, 1.0, diagnostic=True),
        "extra": Column(0.0, 9.0, diagnostic=True, higher_is_better=False),
    }
    data_kinds = ("playground-scenes",)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image, or with an image that is not 24 x 24, gets the minimum, and
        NaN for ``extra``. Raises ValueError if a task has no scene of the playground.
        """
        import numpy as np
        import torch

        from retouch_worlds.playground.world.rendering import codes
        from retouch_worlds.rewards.measuring import (
            CELL_TEMPLATES,
            EXACT_QUALITY,
            OBJECT_WEIGHT,
            CellReading,
            distance,
            image_cells,
            keep,
            quality,
        )

        if not samples:
            return {name: torch.zeros(0) for name in self.columns}
        scenes = [_scene(sample.task) for sample in samples]
        requested, background = codes(scenes), np.array([scene.background for scene in scenes])
        usable = np.array([sample.image is not None and sample.image.size == (SIZE, SIZE) for sample in samples])
        cells = image_cells(samples, usable)
        seen = CellReading.of(cells)
        wanted = requested > 0
        credit = (wanted * keep(distance(cells, CELL_TEMPLATES[seen.backgrounds[:, None], requested]))).sum(-1)
        ground = (seen.backgrounds == background).astype(np.float64)
        extra = (~wanted & (seen.nearest > 0)).sum(-1)
        right = seen.nearest == requested
        columns = {
            "alignment": 10 * (OBJECT_WEIGHT * credit + ground) / (OBJECT_WEIGHT * (wanted.sum(-1) + extra) + 1),
            "quality": quality(seen),
            "shown": (wanted & right).sum(-1) / wanted.sum(-1),
            "ground": ground,
            "extra": np.where(usable, extra, np.nan),
        }
        columns["overall"] = np.sqrt(columns["alignment"] * columns["quality"])
        columns["exact"] = (right.all(-1) & (ground > 0) & (columns["quality"] >= EXACT_QUALITY)).astype(np.float64)
        return {name: torch.from_numpy(np.where(usable, columns[name], low).astype(np.float32)) for name, low in self._lows()}

    def _lows(self) -> list[tuple[str, float]]:
        return [(name, float("nan") if name == "extra" else column.low) for name, column in self.columns.items()]


def _scene(task: Task) -> Scene:
    if "scene" not in task.meta:
        raise ValueError(f"task {task.id!r} has no scene in its meta: this reward needs the tasks of data kind playground-scenes")
    scene = Scene.from_json(task.meta["scene"])
    if not scene.objects:
        raise ValueError(f"task {task.id!r} requests an empty scene; playground-scenes needs at least one object")
    return scene
