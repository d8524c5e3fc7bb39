"""Writer and image model together: the image model that renders a writer's completions explores, and trains on the same samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from PIL.Image import Image

from retouch.protocols import Renderer
from retouch.run.step import Metrics, Phase, Run, ScoredRollout, update
from retouch.types import Batch, Completion, Task, Trajectory


@dataclass(frozen=True, kw_only=True)
class Painting:
    """The image model of a run. ``run``: its policy and its stepper. ``phase``: its objective, learning rate and steps to train.

    ``read``: the task that the image model reads for a completion; None if it has no usable prompt. ``edits``: whether the image
    model reads source images. ``decode``: makes the images of its trajectories.
    """

    run: Run
    phase: Phase
    read: Callable[[Task, Completion], Task | None]
    edits: bool
    decode: Renderer

    def paint(self, batch: Batch, outputs: Sequence[Completion]) -> tuple[Batch, Trajectory, list[Image | None]]:
        """Make an image of each completion, with exploration. Returns the image model's rows, each with the task that it has read.

        A completion without a usable prompt has no image. The image model makes one of the task's own instruction in its
        place, so that all ranks make equally many, and does not train on it.
        """
        own = [batch.tasks[k] if self.edits else replace(batch.tasks[k], images=()) for k in batch.group]
        written = [self.read(task, completion) for task, completion in zip(own, outputs, strict=True)]
        rows = replace(
            batch,
            tasks=tuple(found or task for found, task in zip(written, own, strict=True)),
            group_ids=tuple(batch.group_ids[k] for k in batch.group),  # these and the slots key the noise
            group=tuple(range(len(batch))),
        )
        made = self.run.policy.rollout(rows)
        images = self.decode(rows.tasks, made)
        usable = torch.tensor([found is not None for found in written], device=made.mask.device)
        made = replace(made, mask=made.mask & usable[:, None])
        return rows, made, [image if found else None for image, found in zip(images, written, strict=True)]

    @staticmethod
    def joined(parts: Sequence[tuple[Batch, Trajectory]]) -> tuple[Batch, Trajectory]:
        """The rows of several calls of ``paint`` of one step, in order."""
        batches = [batch for batch, _ in parts]
        rows = replace(
            batches[0],
            tasks=tuple(task for batch in batches for task in batch.tasks),
            group_ids=tuple(number for batch in batches for number in batch.group_ids),
            group=tuple(range(sum(map(len, batches)))),
            slot=tuple(slot for batch in batches for slot in batch.slot),
        )
        return rows, type(parts[0][1]).concat([made for _, made in parts])

    def train(self, step: int, painted: ScoredRollout) -> Metrics:
        """Take the image model's optimizer steps of a training step. Returns the metrics, named ``text_to_image/...``."""
        metrics = update(self.run, self.phase, step, painted)
        return {name.replace("policy/", "text_to_image/", 1): value for name, value in metrics.items()}
