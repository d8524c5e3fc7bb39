"""Imitation of the tasks' targets: cross-entropy for tokens, flow matching for denoisers."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from retouch.objectives.base import ObjectiveContext
from retouch.objectives.distillation import Taught, Teacher, edited, last_edits
from retouch.objectives.nft import ForwardProcess, squared_distance
from retouch.protocols import VelocityPolicy
from retouch.types import Batch, Loss, Minibatch, Needs, Trajectory

_LAST = 2**16
"""The turn of a teacher's last image, behind any number of instructions: its noise is not that of an image in between."""


class Imitation(Taught):
    """Base class of objectives that imitate target images, or completions."""

    teacher: Teacher | None = Field(default=None, exclude_if=operator.not_)
    """The teacher whose images are the targets. It makes them anew in each step. null: the targets of the tasks. With a list of
    ``instructions``, a model that makes single edits well makes the targets of several edits for itself."""

    imitates: ClassVar[bool] = True

    @property
    def taught_by(self) -> Mapping[str, Teacher]:  # type: ignore[override]
        return {} if self.teacher is None else {"teacher": self.teacher}

    @property
    def needs_targets(self) -> bool:
        return self.teacher is None

    def demonstrate(self, policy: Any, batch: Batch) -> Trajectory:
        if self.teacher is None:
            trajectory: Trajectory = policy.demonstrate(batch)
            return trajectory
        numbers = range(len(batch.tasks))
        asked = last_edits(policy, self.teacher, batch, numbers)
        images = edited(policy, self.teacher, batch, numbers, asked, turn=_LAST)
        found = [image for image in images if image is not None]
        if not found:
            raise ValueError("objective.teacher: it made no image of any of the tasks")
        # A task without an image learns nothing; another image only stands where a target is needed.
        tasks = tuple(task.with_target(image or found[0]) for task, image in zip(batch.tasks, images, strict=True))
        trajectory = policy.demonstrate(replace(batch, tasks=tasks))
        made = trajectory.mask.new_tensor([images[number] is not None for number in batch.group])
        return replace(trajectory, mask=trajectory.mask & made[:, None])


class CrossEntropy(Imitation):
    """Cross-entropy on the completions of the tasks (``completion`` in their meta) or on the tokens of target images, for policies
    that write tokens. Logits are divided by the policy's temperature. A microbatch consists of rows of similar length, which
    affects only memory and time.

    Example::

        >>> retouch.CrossEntropy(normalise="sequence").imitates
        True
    """

    kind: Literal["sft"] = "sft"
    normalise: Literal["sequence", "token"] = "token"
    """How the loss is averaged over tokens. ``sequence``: every completion has the same weight. ``token``: every token of all
    completions has the same weight."""

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        order = policy.order_by_length(minibatch.trajectory)  # of a policy that writes tokens
        trajectory, weights = minibatch.trajectory.take(order), minibatch.weights[order]
        for part in policy.microbatches(trajectory):
            evaluation = policy.evaluate(trajectory, part, Needs())
            value = -(weights[part.rows, part.actions] * evaluation.log_probs).sum()
            yield Loss(value, {"policy/loss": value.detach()})

    @property
    def loss_weights(self) -> Literal["sequence", "token", "dr_grpo"]:
        return self.normalise

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        yield from super().problems(context)
        if not context.is_autoregressive:
            yield f"{context.objective}.kind: sft learns from completions of text; use supervised to learn from target images"


class Supervised(Imitation, ForwardProcess):
    """Flow matching on the target images of the tasks: the mean squared error of the velocity at one drawn point per row (Lipman et
    al. 2023, arXiv 2210.02747).

    Example::

        >>> retouch.Supervised(sigma_sampling="uniform").imitates
        True
    """

    kind: Literal["supervised"] = "supervised"
    sigma_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """How sigma is drawn between 0 (data) and 1 (noise)."""

    needs_velocities: ClassVar[bool] = True
    for_tokens: ClassVar[str] = "sft"

    def losses(self, policy: VelocityPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        trajectory = minibatch.trajectory
        for rows in policy.row_slices(trajectory):
            x0 = trajectory.outputs[rows]
            x, noise, sigma = self.draw_points(x0, minibatch.batch, rows, purpose="supervised", epoch=minibatch.epoch, draw=0)
            error = squared_distance(policy.velocity(trajectory, rows, x, sigma, "current"), noise - x0)
            value = (minibatch.weights[rows, 0] * error).sum()
            yield Loss(value, {"policy/loss": value.detach()})
