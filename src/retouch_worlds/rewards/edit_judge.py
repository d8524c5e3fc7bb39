"""The playground's exact judge of edits: it knows the scene and the edits, and compares pixels cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.rewards.base import RewardSection
from retouch.types import Column, Sample, Scores, Task
from retouch_worlds.playground.world.edits import KINDS, MOST_EDITS, Edit, apply
from retouch_worlds.playground.world.scenes import CELLS, SIZE, Scene

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from numpy import ndarray


class PlaygroundReward(RewardSection):
    """The playground's exact judge of edits: it compares the image with ``scene`` and ``edits`` in the task's ``meta``.

    For each cell, d_out is the distance of the image to the expected cell, d_src the distance of the source image to the expected
    cell, d_kept the distance of the image to the source's cell, and d_near the distance of the image to the nearest template
    (empty, or one of the 18 objects) on the background that fits the image best. keep(d) = 1 - clip((d - 0.03) / 0.09, 0, 1).
    ``IF``, instruction following, 0 to 10: 10 x the mean over the edits of the mean over their cells of clip((1 - d_out / d_src -
    0.1) / 0.8, 0, 1); 0 for the unchanged source. ``IP``, identity preservation, 0 to 10: 10 x the weighted mean of keep(d_kept)
    over the cells that no edit touches; cells with an object have weight 3, empty cells 1; 10 for the unchanged source. ``PQ``,
    image quality, 0 to 10, independent of the instruction: 10 x the mean of keep(d_near) over all cells; 0 if no cell shows an
    object (its nearest template is an object, and keep is above 0). ``overall``, 0 to 10: sqrt(min(IF, IP) x PQ). ``exact``: 1 if
    the background and the nearest template of every cell are those of the target and PQ is at least 7, else 0. ``success/<kind>``,
    diagnostics: the share of the task's edits of this kind that are done (the nearest templates of all their cells are those of the
    target); NaN if the task has no such edit.

    Example::

        >>> from retouch_worlds.data.tasks import PlaygroundData
        >>> (task,) = PlaygroundData(count=1, complexity=[1]).tasks()
        >>> scores = retouch.score(retouch.rewards.Playground(), task.target, source=task.images, meta=task.meta)
        >>> scores["overall"]
        10.0
    """

    kind: Literal["playground"] = "playground"

    columns: ClassVar[Mapping[str, Column]] = {
        "IF": Column(0.0, 10.0),
        "IP": Column(0.0, 10.0),
        "PQ": Column(0.0, 10.0),
        "overall": Column(0.0, 10.0),
        "exact": Column(0.0, 1.0),
        **{f"success/{kind}": Column(0.0, 1.0, diagnostic=True) for kind in KINDS},
    }

    data_kinds = ("playground", "playground-indirect")

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image, or with an image that is not 24 x 24, gets the minimum.

        Raises ValueError if a task is not a task of the playground.
        """
        import numpy as np
        import torch

        from retouch_worlds.rewards.measuring import EXACT_QUALITY, CellReading, image_cells, quality

        if not samples:
            return {name: torch.zeros(0) for name in self.columns}
        edits = _Edits.of([sample.task for sample in samples])
        usable = np.array([sample.image is not None and sample.image.size == (SIZE, SIZE) for sample in samples])
        cells = image_cells(samples, usable)
        reading = CellReading.of(cells)
        columns = {"IF": _following(cells, edits), "IP": _preservation(cells, edits), "PQ": quality(reading)}
        columns["overall"] = np.sqrt(np.minimum(columns["IF"], columns["IP"]) * columns["PQ"])
        right = reading.nearest == edits.target
        same = right.all(-1) & (reading.backgrounds == edits.backgrounds)
        columns["exact"] = (same & (columns["PQ"] >= EXACT_QUALITY)).astype(np.float64)
        done = (~edits.member | right[:, None]).all(-1)
        for number, kind in enumerate(KINDS):
            requested = edits.kinds == number
            share = (requested & done).sum(-1) / np.maximum(requested.sum(-1), 1)
            columns[f"success/{kind}"] = np.where(requested.any(-1), share, np.nan)
        return {name: torch.from_numpy(self._or_low(name, column, usable)) for name, column in columns.items()}

    def _or_low(self, name: str, column: Float[ndarray, " b"], usable: Bool[ndarray, " b"]) -> Float[ndarray, " b"]:
        """Set the column to its minimum for unusable images; NaN (a score that does not apply) stays NaN."""
        import numpy as np

        return np.where(usable | np.isnan(column), column, self.columns[name].low).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class _Edits:
    """The requirements of each row's task: the codes of the cells before and after the edits, and which cells each edit touches."""

    backgrounds: Int[ndarray, " b"]
    source: Int[ndarray, "b 9"]
    target: Int[ndarray, "b 9"]
    member: Bool[ndarray, "b 4 9"]
    kinds: Int[ndarray, "b 4"]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> _Edits:
        """Read the edits of the tasks; a task that occurs several times (in a group) is read once."""
        import numpy as np

        from retouch_worlds.playground.world.rendering import codes

        rows: dict[int, int] = {}
        read: list[tuple[Scene, list[Edit]]] = []
        for task in tasks:
            if id(task) not in rows:
                rows[id(task)] = len(read)
                read.append(_read(task))
        member = np.zeros((len(read), MOST_EDITS, CELLS), dtype=bool)
        kinds = np.full((len(read), MOST_EDITS), -1)
        for row, (_, edits) in enumerate(read):
            for number, edit in enumerate(edits):
                member[row, number, list(edit.touches)] = True
                kinds[row, number] = KINDS.index(edit.kind)
        scenes = [scene for scene, _ in read]
        at = [rows[id(task)] for task in tasks]
        return cls(
            backgrounds=np.array([scene.background for scene in scenes])[at],
            source=codes(scenes)[at],
            target=codes([apply(scene, edits) for scene, edits in read])[at],
            member=member[at],
            kinds=kinds[at],
        )


def _read(task: Task) -> tuple[Scene, list[Edit]]:
    """Read the scene and the edits from a task's ``meta``. Raises ValueError if they are missing."""
    edits = task.meta.get("edits")
    if "scene" not in task.meta or not isinstance(edits, list) or not 1 <= len(edits) <= MOST_EDITS:
        raise ValueError(
            f"task {task.id!r} has no scene and edits in its meta: the playground reward needs tasks of the playground"
        )
    return Scene.from_json(task.meta["scene"]), [Edit.from_json(edit) for edit in edits]


def _following(cells: Float[ndarray, "b 9 192"], edits: _Edits) -> Float[ndarray, " b"]:
    """Compute the column ``IF``, 0 to 10."""
    import numpy as np

    from retouch_worlds.rewards.measuring import CELL_TEMPLATES, distance

    target = CELL_TEMPLATES[edits.backgrounds[:, None], edits.target]
    source = CELL_TEMPLATES[edits.backgrounds[:, None], edits.source]
    before = distance(source, target)
    left = distance(cells, target) / np.where(before > 0, before, 1)
    credit = np.clip((1 - left - 0.1) / 0.8, 0, 1)
    size = edits.member.sum(-1)
    by_edit = (edits.member * credit[:, None]).sum(-1) / np.maximum(size, 1)
    return 10 * by_edit.sum(-1) / (size > 0).sum(-1)


def _preservation(cells: Float[ndarray, "b 9 192"], edits: _Edits) -> Float[ndarray, " b"]:
    """Compute the column ``IP``, 0 to 10. At least one cell is untouched, because four edits touch at most eight of the nine."""
    import numpy as np

    from retouch_worlds.rewards.measuring import CELL_TEMPLATES, OBJECT_WEIGHT, distance, keep

    weights = np.where(edits.member.any(1), 0.0, np.where(edits.source > 0, OBJECT_WEIGHT, 1.0))
    kept = keep(distance(cells, CELL_TEMPLATES[edits.backgrounds[:, None], edits.source]))
    return 10 * (weights * kept).sum(-1) / weights.sum(-1)
