"""The playground's exact judge: it knows the scene and the edits and measures pixels, cell by cell.

Distances are root mean squares over the 192 values of a cell in units of the full range (0 to 1). Squared distances are sums of
whole numbers, exact in float64, so a score does not depend on what else is in the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from retouch.playground.world.edits import KINDS, MOST_EDITS, Edit, apply
from retouch.playground.world.rendering import TEMPLATES, codes
from retouch.playground.world.scenes import BACKGROUNDS, CELL, CELLS, GRID, SIZE, Scene
from retouch.types import Column, Sample, Scores, Task

# 7.7 of 255 cost nothing: an autoencoder's noise is about 4. Any two things on one background differ by more than DEAD + SCALE.
DEAD = 0.03
SCALE = 0.09
OBJECT_WEIGHT = 3.0
EXACT_QUALITY = 7.0

_VALUES = CELL * CELL * 3
_TEMPLATES: Float[ndarray, "4 19 192"] = TEMPLATES.reshape(len(BACKGROUNDS), -1, _VALUES).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class _Plans:
    """What is to be done in each row: codes of the cells before and after, and which cells belong to which edit."""

    backgrounds: Int[ndarray, " b"]
    source: Int[ndarray, "b 9"]
    target: Int[ndarray, "b 9"]
    member: Bool[ndarray, "b 4 9"]
    kinds: Int[ndarray, "b 4"]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "_Plans":
        """The tasks' plans; a task that occurs often (a group's) is read once."""
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


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """What the pictures show: the background, and each cell's nearest code on it with its distance."""

    backgrounds: Int[ndarray, " b"]
    nearest: Int[ndarray, "b 9"]
    distance: Float[ndarray, "b 9"]

    @classmethod
    def of(cls, cells: Float[ndarray, "b 9 192"]) -> "_Reading":
        """The background is the one on which the cells, each taken for its nearest template, are explained best."""
        squares = (cells**2).sum(-1)[..., None, None] + (_TEMPLATES**2).sum(-1)
        squares = squares - 2 * (cells @ _TEMPLATES.reshape(-1, _VALUES).T).reshape(squares.shape)
        backgrounds = squares.min(-1).sum(1).argmin(-1)
        squares = np.take_along_axis(squares, backgrounds[:, None, None, None], axis=2)[:, :, 0]
        return cls(backgrounds, squares.argmin(-1), np.sqrt(squares.min(-1) / _VALUES) / 255)


class PlaygroundJudge:
    """Scores samples of ``PlaygroundTasks`` against ``scene`` and ``edits`` in their task's ``meta``.

    Per cell: d_out is the distance of the picture to the expected cell, d_src that of the source to it, d_kept the picture's to the
    source's cell, d_near the picture's to the nearest template (empty, or one of the 18 things) on the background that explains
    the picture best. keep(d) = 1 - clip((d - 0.03) / 0.09, 0, 1). Columns:

    - ``IF``, instruction following: 10 x mean over the edits of the mean over their cells of
      clip((1 - d_out / d_src - 0.1) / 0.8, 0, 1); 0 for the untouched source.
    - ``IP``, identity preservation: 10 x weighted mean of keep(d_kept) over the cells that no edit touches; those with a thing
      weigh 3, empty ones 1. 10 for the untouched source.
    - ``PQ``, picture quality, blind to the instruction: 10 x mean of keep(d_near) over all cells; 0 where no cell shows a thing
      (one that is nearest and has keep above 0).
    - ``overall``: sqrt(min(IF, IP) x PQ).
    - ``exact``: 1 where background and every cell's nearest template are the target's and PQ is at least 7, else 0.
    - ``success/<kind>``: the share of the task's edits of this kind that are done, that is, all their cells' nearest templates
      are the target's; NaN where the task has none.

    A sample without an image, or with one of another size than 24 x 24, gets the minimum: it is the policy's own fault.
    """

    columns: Mapping[str, Column] = {
        "IF": Column(0.0, 10.0),
        "IP": Column(0.0, 10.0),
        "PQ": Column(0.0, 10.0),
        "overall": Column(0.0, 10.0),
        "exact": Column(0.0, 1.0),
        **{f"success/{kind}": Column(0.0, 1.0, diagnostic=True) for kind in KINDS},
    }

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32. ValueError where a task is not the playground's."""
        if not samples:
            return {name: torch.zeros(0) for name in self.columns}
        plans = _Plans.of([sample.task for sample in samples])
        usable = np.array([sample.image is not None and sample.image.size == (SIZE, SIZE) for sample in samples])
        cells = _cells(samples, usable)
        reading = _Reading.of(cells)
        columns = {"IF": _following(cells, plans), "IP": _preservation(cells, plans), "PQ": _quality(reading)}
        columns["overall"] = np.sqrt(np.minimum(columns["IF"], columns["IP"]) * columns["PQ"])
        right = reading.nearest == plans.target
        same = right.all(-1) & (reading.backgrounds == plans.backgrounds)
        columns["exact"] = (same & (columns["PQ"] >= EXACT_QUALITY)).astype(np.float64)
        done = (~plans.member | right[:, None]).all(-1)
        for number, kind in enumerate(KINDS):
            asked = plans.kinds == number
            share = (asked & done).sum(-1) / np.maximum(asked.sum(-1), 1)
            columns[f"success/{kind}"] = np.where(asked.any(-1), share, np.nan)
        return {name: torch.from_numpy(self._or_low(name, column, usable)) for name, column in columns.items()}

    def _or_low(self, name: str, column: Float[ndarray, " b"], usable: Bool[ndarray, " b"]) -> Float[ndarray, " b"]:
        """The column with its minimum where there was nothing to judge; what does not apply stays NaN."""
        return np.where(usable | np.isnan(column), column, self.columns[name].low).astype(np.float32)


def _read(task: Task) -> tuple[Scene, list[Edit]]:
    """The scene and the edits of a task's meta."""
    edits = task.meta.get("edits")
    if "scene" not in task.meta or not isinstance(edits, list) or not 1 <= len(edits) <= MOST_EDITS:
        raise ValueError(
            f"task {task.id!r} has no scene and edits in its meta: the playground's judge needs the playground's own tasks"
        )
    return Scene.from_json(task.meta["scene"]), [Edit.from_json(edit) for edit in edits]


def _cells(samples: Sequence[Sample], usable: Bool[ndarray, " b"]) -> Float[ndarray, "b 9 192"]:
    """The pictures cut into cells, 0 to 255; black where there is nothing to judge."""
    stack = np.zeros((len(samples), SIZE, SIZE, 3), dtype=np.uint8)
    for row, sample in enumerate(samples):
        if usable[row] and sample.image is not None:
            stack[row] = np.asarray(sample.image if sample.image.mode == "RGB" else sample.image.convert("RGB"))
    cut = stack.reshape(-1, GRID, CELL, GRID, CELL, 3).transpose(0, 1, 3, 2, 4, 5)
    return cut.reshape(-1, CELLS, _VALUES).astype(np.float64)


def _distance(a: Float[ndarray, "b 9 192"], b: Float[ndarray, "b 9 192"]) -> Float[ndarray, "b 9"]:
    """Root mean square per cell, 0 to 1."""
    return np.sqrt(((a - b) ** 2).sum(-1) / _VALUES) / 255


def _keep(distance: Float[ndarray, "b 9"]) -> Float[ndarray, "b 9"]:
    """1 within the dead zone, 0 from ``DEAD + SCALE`` on, a line between."""
    return 1 - np.clip((distance - DEAD) / SCALE, 0, 1)


def _following(cells: Float[ndarray, "b 9 192"], plans: _Plans) -> Float[ndarray, " b"]:
    """IF, 0 to 10."""
    target = _TEMPLATES[plans.backgrounds[:, None], plans.target]
    source = _TEMPLATES[plans.backgrounds[:, None], plans.source]
    before = _distance(source, target)
    left = _distance(cells, target) / np.where(before > 0, before, 1)
    credit = np.clip((1 - left - 0.1) / 0.8, 0, 1)
    size = plans.member.sum(-1)
    by_edit = (plans.member * credit[:, None]).sum(-1) / np.maximum(size, 1)
    return 10 * by_edit.sum(-1) / (size > 0).sum(-1)


def _preservation(cells: Float[ndarray, "b 9 192"], plans: _Plans) -> Float[ndarray, " b"]:
    """IP, 0 to 10. At least one cell is untouched: four edits touch eight at most."""
    weights = np.where(plans.member.any(1), 0.0, np.where(plans.source > 0, OBJECT_WEIGHT, 1.0))
    kept = _keep(_distance(cells, _TEMPLATES[plans.backgrounds[:, None], plans.source]))
    return 10 * (weights * kept).sum(-1) / weights.sum(-1)


def _quality(reading: _Reading) -> Float[ndarray, " b"]:
    """PQ, 0 to 10."""
    keep = _keep(reading.distance)
    shown = ((reading.nearest > 0) & (keep > 0)).any(-1)
    return 10 * keep.mean(-1) * shown
