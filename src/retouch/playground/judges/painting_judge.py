"""The exact judge of paintings: it knows the scene that was asked for and measures pixels, cell by cell.

It reads pictures as the judge of edits does (``retouch.playground.judges.judge``): the same distances, the same dead zone.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from retouch.playground.judges.judge import EXACT_QUALITY, OBJECT_WEIGHT, _cells, _distance, _keep, _quality, _Reading
from retouch.playground.world.rendering import TEMPLATES, codes
from retouch.playground.world.scenes import BACKGROUNDS, SIZE, Scene
from retouch.types import Column, Sample, Scores, Task

_TEMPLATES = TEMPLATES.reshape(len(BACKGROUNDS), -1, TEMPLATES[0, 0].size).astype(np.float64)


class PaintingJudge:
    """Scores samples of ``PaintingTasks`` against the ``scene`` in their task's ``meta``: it never sees what a writer wrote.

    The picture's background is the one that explains it best. Per cell that is to hold a thing: d_thing is the distance of the
    picture to that thing on the picture's background; keep(d) = 1 - clip((d - 0.03) / 0.09, 0, 1). Columns:

    - ``alignment``: 10 x (3 x sum of keep(d_thing) + ground) / (3 x (things asked for + things too many) + 1), where ground is 1 on
      the background that was asked for, else 0, and a thing is too many in a cell that is to be empty.
    - ``quality``, blind to what was asked for: 10 x mean over the cells of keep of the distance to the nearest template; 0 where no
      cell shows a thing.
    - ``overall``: sqrt(alignment x quality).
    - ``exact``: 1 where background and every cell's nearest template are the scene's and quality is at least 7, else 0.
    - ``shown``: the share of the things asked for that stand in their cell; ``ground``: as above; ``extra``: things too many.

    A sample without an image, or with one of another size than 24 x 24, gets the minimum (of ``extra`` nothing is said): it is the
    policy's own fault.
    """

    columns: Mapping[str, Column] = {
        "alignment": Column(0.0, 10.0),
        "quality": Column(0.0, 10.0),
        "overall": Column(0.0, 10.0),
        "exact": Column(0.0, 1.0),
        "shown": Column(0.0, 1.0, diagnostic=True),
        "ground": Column(0.0, 1.0, diagnostic=True),
        "extra": Column(0.0, 9.0, diagnostic=True, higher_is_better=False),
    }

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32. ValueError where a task is not one of ``PaintingTasks``."""
        if not samples:
            return {name: torch.zeros(0) for name in self.columns}
        scenes = [_scene(sample.task) for sample in samples]
        asked, background = codes(scenes), np.array([scene.background for scene in scenes])
        usable = np.array([sample.image is not None and sample.image.size == (SIZE, SIZE) for sample in samples])
        cells = _cells(samples, usable)
        seen = _Reading.of(cells)
        wanted = asked > 0
        credit = (wanted * _keep(_distance(cells, _TEMPLATES[seen.backgrounds[:, None], asked]))).sum(-1)
        ground = (seen.backgrounds == background).astype(np.float64)
        extra = (~wanted & (seen.nearest > 0)).sum(-1)
        right = seen.nearest == asked
        columns = {
            "alignment": 10 * (OBJECT_WEIGHT * credit + ground) / (OBJECT_WEIGHT * (wanted.sum(-1) + extra) + 1),
            "quality": _quality(seen),
            "shown": (wanted & right).sum(-1) / wanted.sum(-1),
            "ground": ground,
            "extra": np.where(usable, extra, np.nan),
        }
        columns["overall"] = np.sqrt(columns["alignment"] * columns["quality"])
        columns["exact"] = (right.all(-1) & (ground > 0) & (columns["quality"] >= EXACT_QUALITY)).astype(np.float64)
        return {name: torch.from_numpy(np.where(usable, columns[name], low).astype(np.float32)) for name, low in self._lows()}

    def _lows(self) -> list[tuple[str, float]]:
        return [(name, np.nan if name == "extra" else column.low) for name, column in self.columns.items()]


def _scene(task: Task) -> Scene:
    if "scene" not in task.meta:
        raise ValueError(f"task {task.id!r} has no scene in its meta: the painting judge needs the playground's own paintings")
    scene = Scene.from_json(task.meta["scene"])
    if not scene.objects:
        raise ValueError(f"task {task.id!r} asks for an empty scene")
    return scene
