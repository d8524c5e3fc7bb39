"""The contract of a renderer: one image per row, which depends on that row only."""

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from retouch.protocols import Renderer
from retouch.types import Task
from retouch_worlds.testing.assertions import call_twice, require


def check_renderer(renderer: Renderer, tasks: Sequence[Task], trajectory: Any) -> None:
    """Raises AssertionError if ``renderer`` violates the contract on the rows of ``trajectory``; ``tasks`` has one task per row.

    - It returns one RGB image or None per row, and the same on a second call, whatever the state of torch's global generator.
    - A row's image does not depend on the other rows (up to 1 level of 255, for rounding), and the outputs are not modified.
    - If the outputs are a floating-point tensor: a row that is not finite gives None, and the other rows their images.

    Example::

        >>> from retouch.renderers.decoders import LatentRenderer
        >>> rows = [batch.tasks[task] for task in batch.group]
        >>> retouch.testing.check_renderer(LatentRenderer(policy.model), rows, policy.rollout(batch))
    """
    require(
        len(tasks) == len(trajectory) >= 2, f"{len(tasks)} tasks for {len(trajectory)} rows; give one per row, and at least two"
    )
    outputs = trajectory.outputs
    before = outputs.clone() if isinstance(outputs, Tensor) else None
    images, again = call_twice(lambda: renderer(tasks, trajectory), "the renderer")
    require(len(images) == len(trajectory), f"{len(images)} images for {len(trajectory)} rows")
    if before is not None:
        require(torch.equal(before.nan_to_num(), outputs.nan_to_num()), "the renderer changed the trajectory's outputs")
    for row, image in enumerate(images):
        if image is not None:
            require(image.mode == "RGB", f"the image of row {row} has mode {image.mode}, not RGB")
        _require_same(image, again[row], levels=0, what=f"row {row} rendered again")
    for row in (0, len(images) - 1):
        alone = renderer([tasks[row]], trajectory.take(slice(row, row + 1)))
        _require_same(alone[0], images[row], levels=1, what=f"row {row} rendered alone")
    if before is not None and before.is_floating_point() and is_dataclass(trajectory):
        broken = before.clone()
        broken[0] = torch.nan
        drawn = renderer(tasks, replace(trajectory, outputs=broken))  # type: ignore[type-var]
        require(drawn[0] is None, "a row whose output is not finite was rendered; it is the policy's fault and must give None")
        for row in range(1, len(images)):
            _require_same(drawn[row], images[row], levels=1, what=f"row {row} in a batch with a row that cannot be rendered")


def _require_same(a: Image | None, b: Image | None, *, levels: int, what: str) -> None:
    require((a is None) == (b is None), f"{what}: an image in one case and None in the other")
    if a is not None and b is not None:
        require(a.size == b.size, f"{what}: sizes {a.size} and {b.size} differ")
        difference = int(np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)).max())
        require(difference <= levels, f"{what}: images differ by {difference} levels of 255; the limit is {levels}")
