"""The measurements of the playground's judges.

Edits and scenes are measured by distances between the cells of an image and the templates of all objects. A distance is the root
mean square difference over the 192 values of a cell, in units of the full range (0 to 1). Squared distances are sums of integers,
exact in float64, so that a score does not depend on the rest of the batch. The colours of signs are red, green and blue, 0 to 255;
distances between colours are Euclidean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from PIL.Image import Image

from retouch.types import Column, Sample, Scores, Task
from retouch_worlds.playground.rendering import TEMPLATES, codes
from retouch_worlds.playground.scenes import BACKGROUNDS, CELL, CELLS, GRID, KINDS, MOST_EDITS, SIZE, Edit, Scene, apply

# DEAD is 7.7 of 255, so that the noise of an autoencoder (about 4) costs nothing. Two objects on the same background differ by more
# than DEAD + SCALE.
DEAD = 0.03
SCALE = 0.09
OBJECT_WEIGHT = 3.0
EXACT_QUALITY = 7.0

FARTHEST = 8
CONTRAST = 60.0
SAME, OTHER = 16.0, 80.0

VALUES = CELL * CELL * 3
CELL_TEMPLATES: Float[ndarray, "4 19 192"] = TEMPLATES.reshape(len(BACKGROUNDS), -1, VALUES).astype(np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class CellReading:
    """The content of images: the background, and for each cell the code of the nearest template on it, with its distance."""

    backgrounds: Int[ndarray, " b"]
    nearest: Int[ndarray, "b 9"]
    distance: Float[ndarray, "b 9"]

    @classmethod
    def of(cls, cells: Float[ndarray, "b 9 192"]) -> "CellReading":
        """Read cells with values 0 to 255. The background is the one with the smallest sum of squared distances of the cells to
        their nearest templates."""
        squares = (cells**2).sum(-1)[..., None, None] + (CELL_TEMPLATES**2).sum(-1)
        squares = squares - 2 * (cells @ CELL_TEMPLATES.reshape(-1, VALUES).T).reshape(squares.shape)
        backgrounds = squares.min(-1).sum(1).argmin(-1)
        squares = np.take_along_axis(squares, backgrounds[:, None, None, None], axis=2)[:, :, 0]
        return cls(backgrounds, squares.argmin(-1), np.sqrt(squares.min(-1) / VALUES) / 255)


def image_cells(samples: Sequence[Sample], usable: Bool[ndarray, " b"]) -> Float[ndarray, "b 9 192"]:
    """Cut the images into cells, 0 to 255; images that are not ``usable`` are black."""
    stack = np.zeros((len(samples), SIZE, SIZE, 3), dtype=np.uint8)
    for row, sample in enumerate(samples):
        if usable[row] and sample.image is not None:
            stack[row] = np.asarray(sample.image if sample.image.mode == "RGB" else sample.image.convert("RGB"))
    cells = stack.reshape(-1, GRID, CELL, GRID, CELL, 3).transpose(0, 1, 3, 2, 4, 5)
    return cells.reshape(-1, CELLS, VALUES).astype(np.float64)


def distance(a: Float[ndarray, "b 9 192"], b: Float[ndarray, "b 9 192"]) -> Float[ndarray, "b 9"]:
    """Return the root mean square difference of each cell, 0 to 1. ``a``, ``b``: 0 to 255."""
    return np.sqrt(((a - b) ** 2).sum(-1) / VALUES) / 255


def keep(distance: Float[ndarray, "b 9"]) -> Float[ndarray, "b 9"]:
    """Return 1 for distances up to ``DEAD``, 0 from ``DEAD + SCALE`` on, and linear values between."""
    return 1 - np.clip((distance - DEAD) / SCALE, 0, 1)


def quality(reading: CellReading) -> Float[ndarray, " b"]:
    """Return the image quality, 0 to 10: 10 x the mean of ``keep`` over the cells; 0 if no cell shows an object."""
    kept = keep(reading.distance)
    shown = ((reading.nearest > 0) & (kept > 0)).any(-1)
    return 10 * kept.mean(-1) * shown


# Edits


def edit_scores(samples: Sequence[Sample], declared: Mapping[str, Column]) -> Scores:
    """The columns of ``PlaygroundReward``."""
    if not samples:
        return {name: torch.zeros(0) for name in declared}
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
    scores = {}
    for name, column in columns.items():  # NaN (a score that does not apply) stays NaN for unusable images
        kept = np.where(usable | np.isnan(column), column, declared[name].low)
        scores[name] = torch.from_numpy(kept.astype(np.float32))
    return scores


@dataclass(frozen=True, slots=True, eq=False)
class _Edits:
    """The requirements of each row's task: the codes of the cells before and after the edits, and which cells each edit touches."""

    backgrounds: Int[ndarray, " b"]
    source: Int[ndarray, "b 9"]
    target: Int[ndarray, "b 9"]
    member: Bool[ndarray, "b 4 9"]
    kinds: Int[ndarray, "b 4"]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "_Edits":
        """Read the edits of the tasks; a task that occurs several times (in a group) is read once."""
        rows: dict[int, int] = {}
        read: list[tuple[Scene, list[Edit]]] = []
        for task in tasks:
            if id(task) not in rows:
                given = task.meta.get("edits")
                if "scene" not in task.meta or not isinstance(given, list) or not 1 <= len(given) <= MOST_EDITS:
                    raise ValueError(
                        f"task {task.id!r} has no scene and edits in its meta: the playground reward needs tasks of the playground"
                    )
                rows[id(task)] = len(read)
                read.append((Scene.from_json(task.meta["scene"]), [Edit.from_json(edit) for edit in given]))
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


def _following(cells: Float[ndarray, "b 9 192"], edits: _Edits) -> Float[ndarray, " b"]:
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
    weights = np.where(edits.member.any(1), 0.0, np.where(edits.source > 0, OBJECT_WEIGHT, 1.0))
    kept = keep(distance(cells, CELL_TEMPLATES[edits.backgrounds[:, None], edits.source]))
    return 10 * (weights * kept).sum(-1) / weights.sum(-1)


# Scenes


def scene_scores(samples: Sequence[Sample], declared: Mapping[str, Column]) -> Scores:
    """The columns of ``SceneReward``."""
    if not samples:
        return {name: torch.zeros(0) for name in declared}
    scenes = []
    for task in (sample.task for sample in samples):
        if "scene" not in task.meta:
            raise ValueError(
                f"task {task.id!r} has no scene in its meta: this reward needs the tasks of data kind playground-scenes"
            )
        scenes.append(Scene.from_json(task.meta["scene"]))
        if not scenes[-1].objects:
            raise ValueError(f"task {task.id!r} requests an empty scene; playground-scenes needs at least one object")
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
    scores = {}
    for name, column in declared.items():
        low = np.nan if name == "extra" else column.low
        scores[name] = torch.from_numpy(np.where(usable, columns[name], low).astype(np.float32))
    return scores


# Signs


def sign_scores(samples: Sequence[Sample]) -> Scores:
    """The columns of ``SignReward``."""
    wanted: dict[int, tuple[Float[ndarray, " 3"], Float[ndarray, " 3"]]] = {}
    found = np.zeros((len(samples), 2), dtype=np.float32)
    for row, sample in enumerate(samples):
        if sample.task.mask is None or sample.task.mask.getbbox() is None or sample.task.reference is None:
            raise ValueError(
                f"task {sample.task.id!r} has no sign (mask) or no reference: playground-signs needs words of the playground"
            )
        mask, reference = sample.task.mask, sample.task.reference
        if id(sample.task) not in wanted:
            wanted[id(sample.task)] = paper_and_ink(_pixels(reference).reshape(-1, 3))
        if sample.image is not None and sample.image.size == mask.size:
            paper, ink = wanted[id(sample.task)]
            own_paper, own_ink = paper_and_ink(_pixels(sample.image)[np.asarray(mask) > 127])
            written = np.linalg.norm(own_ink - own_paper) >= CONTRAST
            found[row] = _agreement(own_paper, paper), _agreement(own_ink, ink) if written else 0.0
    papers, inks = torch.from_numpy(found).unbind(dim=1)
    return {"style": (papers + inks) / 2, "paper": papers, "ink": inks}


def paper_and_ink(pixels: Int[ndarray, "n 3"]) -> tuple[Float[ndarray, " 3"], Float[ndarray, " 3"]]:
    """Return the paper colour and the ink colour of a sign's pixels. If nothing is written, both are nearly equal."""
    paper = np.median(pixels, axis=0)
    away = np.linalg.norm(pixels - paper, axis=1)
    return paper, pixels[np.argsort(-away, kind="stable")[:FARTHEST]].mean(axis=0)


def _agreement(one: Float[ndarray, " 3"], other: Float[ndarray, " 3"]) -> float:
    return 1.0 - float(np.clip((np.linalg.norm(one - other) - SAME) / (OTHER - SAME), 0.0, 1.0))


def _pixels(image: Image) -> Int[ndarray, "h w 3"]:
    return np.asarray(image.convert("RGB")).astype(np.int64)
