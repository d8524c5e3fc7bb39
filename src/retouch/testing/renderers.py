"""The contract of a renderer: one picture a row, of that row alone."""

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from retouch.protocols import Renderer
from retouch.testing.figures import require, twice
from retouch.types import Task


def check_renderer(renderer: Renderer, tasks: Sequence[Task], trajectory: Any) -> None:
    """AssertionError where ``renderer`` breaks a promise on the rows of ``trajectory``; ``tasks`` are theirs, one a row.

    - It gives one RGB picture, or None, a row; the same again, whatever torch's global generator says.
    - A row's picture does not depend on the others (a level of 255 is allowed for rounding), and the outputs stay as they were.
    - Where the outputs are a floating tensor: a row that is not finite gives None, and the others their pictures.
    """
    require(len(tasks) == len(trajectory) >= 2, f"{len(tasks)} tasks for {len(trajectory)} rows; give one a row, and at least two")
    outputs = trajectory.outputs
    before = outputs.clone() if isinstance(outputs, Tensor) else None
    images, again = twice(lambda: renderer(tasks, trajectory), "the renderer")
    require(len(images) == len(trajectory), f"{len(images)} pictures for {len(trajectory)} rows")
    if before is not None:
        require(torch.equal(before.nan_to_num(), outputs.nan_to_num()), "the renderer changed the trajectory's outputs")
    for row, image in enumerate(images):
        if image is not None:
            require(image.mode == "RGB", f"the picture of row {row} has mode {image.mode}, not RGB")
        _require_same(image, again[row], levels=0, what=f"row {row} rendered again")
    for row in (0, len(images) - 1):
        alone = renderer([tasks[row]], trajectory.take(slice(row, row + 1)))
        _require_same(alone[0], images[row], levels=1, what=f"row {row} rendered alone")
    if before is not None and before.is_floating_point() and is_dataclass(trajectory):
        broken = before.clone()
        broken[0] = torch.nan
        drawn = renderer(tasks, replace(trajectory, outputs=broken))  # type: ignore[type-var]
        require(drawn[0] is None, "a row whose output is not finite was drawn; it is the policy's own fault and gives None")
        for row in range(1, len(images)):
            _require_same(drawn[row], images[row], levels=1, what=f"row {row} beside one that cannot be drawn")


def _require_same(a: Image | None, b: Image | None, *, levels: int, what: str) -> None:
    require((a is None) == (b is None), f"{what}: a picture once and None once")
    if a is not None and b is not None:
        require(a.size == b.size, f"{what}: sizes {a.size} and {b.size} differ")
        apart = int(np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)).max())
        require(apart <= levels, f"{what}: pictures differ by {apart} levels of 255, and {levels} are allowed")
