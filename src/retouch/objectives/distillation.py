"""On-policy distillation: the policy samples, and learns in each state that it reaches what a teacher would do there."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.section import Section
from retouch.objectives.base import Objective, ObjectiveContext
from retouch.protocols import TaughtPolicy
from retouch.types import Batch, Lesson, Loss, Minibatch, Task

if TYPE_CHECKING:
    from PIL.Image import Image


class Teacher(Section):
    """A teacher: another model, or the policy's own one with other weights, guidance or instructions.

    Example::

        >>> retouch.Teacher(instructions="thought").run is None
        True
    """

    run: str | None = None
    """The folder of a run with the same model and ``policy.train``, whose newest weights teach (their average, if it kept one);
    null means the weights before this run, or before this phase if the phase before it imitates."""
    model: str | None = Field(default=None, exclude_if=operator.not_)
    """Folder or Hugging Face id of another pipeline of the policy's family, such as a larger one: its denoiser teaches, with the
    policy's text encoders and autoencoder, which must be the same. It is stored as ``policy.base`` says for the policy's frozen
    weights, and is in CPU memory while it does not teach."""
    guidance_scale: Annotated[float, Field(ge=1.0)] | None = None
    """The teacher's scale of classifier-free guidance; null means that of the rollout."""
    instructions: str | None = None
    """The key of the tasks' ``meta`` with what the teacher reads in place of the instruction: a text, such as a better prompt, or a
    list of texts. It follows a list one after the other, each on the image before, so a model that makes single edits well teaches
    itself to make several at once."""

    def texts(self, task: Task) -> list[str]:
        """What the teacher reads for a task. Raises ValueError if it is missing or no text."""
        assert self.instructions is not None
        found = task.meta.get(self.instructions)
        texts = [found] if isinstance(found, str) else found
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            what = f"the teacher's instructions are a text or a list of texts, and it is {found!r}"
            raise ValueError(f"task {task.id!r}: meta[{self.instructions!r}]: {what}; see objective.teachers")
        return [str(text) for text in texts]


class OPD(Objective):
    """On-policy distillation. Loss of an action: the divergence of the policy from its teacher, in the state that the policy
    reached.

    For a stochastic denoising step, this is the KL of the policy's and the teacher's Gaussian; for a deterministic one, it is
    |v - v_teacher|^2, a mean over the latent. For tokens, it is ``kl`` over all ids. Advantages are not used, and the
    recipe's reward is only measured. A phase with this objective may come before or after one that learns from rewards.

    Source: Flow-OPD (arXiv 2605.08063); for tokens, generalized knowledge distillation (Agarwal et al. 2023, arXiv 2306.13649).

    Example::

        >>> retouch.OPD(teachers={"guided": retouch.Teacher(guidance_scale=4.0)}).by is None
        True
    """

    kind: Literal["opd"] = "opd"
    teachers: Annotated[dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], Teacher], Field(min_length=1)]
    """The teachers by name."""
    by: str | None = None
    """The tag of the tasks that names the teacher of each task, if there are several."""
    kl: Literal["forward", "reverse"] = Field(default="forward", exclude_if=lambda chosen: chosen == "forward")
    """The divergence of tokens. ``forward``: KL(teacher, policy), which also raises tokens that the policy hardly samples.
    ``reverse``: KL(policy, teacher), which keeps to tokens that the teacher finds likely. Both are equal for denoising steps."""

    uses_advantages: ClassVar[bool] = False
    learns_from_teachers: ClassVar[bool] = True

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset(self._copy(name) for name, teacher in self.teachers.items() if teacher.model is None)

    @property
    def stored_copies(self) -> Mapping[str, str]:  # type: ignore[override]
        return {self._copy(name): teacher.run for name, teacher in self.teachers.items() if teacher.run is not None}

    @property
    def models(self) -> Mapping[str, str]:  # type: ignore[override]
        return {self._copy(name): teacher.model for name, teacher in self.teachers.items() if teacher.model is not None}

    def _copy(self, name: str) -> str:
        """The name of the teacher's weights. It follows from their path: in another phase, another teacher may have this name."""
        path = self.teachers[name].run or self.teachers[name].model
        return "reference" if path is None else f"teacher-{hashlib.sha256(path.encode()).hexdigest()[:12]}"

    def losses(self, policy: TaughtPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        import torch

        batch, lessons = minibatch.batch, []
        chosen = []
        for task in batch.tasks:
            tag = next(iter(self.teachers)) if self.by is None else task.tags.get(self.by)
            if tag not in self.teachers:
                has = f"its tag {self.by!r} is {tag!r}" if tag is not None else f"it has no tag {self.by!r}"
                raise ValueError(f"task {task.id!r} has no teacher: {has}; objective.teachers has {', '.join(self.teachers)}")
            chosen.append(tag)
        for name, teacher in self.teachers.items():
            tasks = [number for number, theirs in enumerate(chosen) if theirs == name]
            if tasks:
                texts = None if teacher.instructions is None else [teacher.texts(batch.tasks[number]) for number in tasks]
                weights, scale = self._copy(name), teacher.guidance_scale
                asked = _after_turns(batch, tasks, texts, partial(policy.teacher_images, weights=weights, guidance_scale=scale))
                places = minibatch.weights.new_full((len(batch.tasks),), -1, dtype=torch.long)
                places[tasks] = torch.arange(len(tasks), device=places.device)
                inputs = policy.teacher_inputs(asked, guidance_scale=scale)
                lessons.append(Lesson(weights=weights, inputs=inputs, places=places, guidance_scale=scale))
        taught = policy.teach(minibatch.trajectory, lessons)
        for part in policy.microbatches(minibatch.trajectory):
            divergence = policy.divergence(minibatch.trajectory, part, taught, forward=self.kl == "forward")
            value = (minibatch.weights[part.rows, part.actions] * divergence).sum()
            yield Loss(value, {"policy/loss": value.detach()})

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        key = f"{context.objective}.teachers"
        if len(self.teachers) > 1 and self.by is None:
            yield f"{context.objective}.by: there are {len(self.teachers)} teachers; name the tag of the tasks that chooses one"
        for name, teacher in self.teachers.items():
            if not (teacher.run or teacher.model or teacher.guidance_scale or teacher.instructions):
                same = "it is the policy before training with the same inputs, so there is nothing to learn"
                yield f"{key}.{name}: {same}; set run, model, guidance_scale or instructions"
            if teacher.run is not None and teacher.model is not None:
                yield f"{key}.{name}.model: run names other weights of the policy's own model; give one of the two"
            if teacher.model is not None and context.is_autoregressive:
                yield f"{key}.{name}.model: a policy that writes tokens is taught by its own model only; use run"
            if teacher.guidance_scale is not None and context.is_autoregressive:
                yield f"{key}.{name}.guidance_scale: tokens are sampled without guidance; remove it"
        if context.sharded and (self.by is not None or any(teacher.instructions for teacher in self.teachers.values())):
            why = "with sharding fsdp2 all ranks must call the model equally often, and the number of a teacher's tasks differs"
            yield f"{key}: {why}; use sharding null or zero2"
        if context.engine and not context.stochastic:
            yield f"{context.rollout}.engine: an engine returns no state of a deterministic chain, which opd needs; remove it"


def _after_turns(
    batch: Batch,
    tasks: Sequence[int],
    instructions: Sequence[Sequence[str]] | None,
    edit: Callable[[Batch], Sequence[Image | None]],
) -> list[Task]:
    """The tasks with these numbers as their teacher sees them.

    Of several instructions, the teacher follows all but the last one by itself, each on the image before: ``edit`` makes the images
    of a batch, and None leaves an image as it was. It then sees the image so far and the last instruction.
    """
    asked = [batch.tasks[number] for number in tasks]
    if instructions is None:
        return asked
    for turn in range(max(map(len, instructions))):
        asked = [
            replace(task, instruction=texts[min(turn, len(texts) - 1)]) for task, texts in zip(asked, instructions, strict=True)
        ]
        rows = [row for row, texts in enumerate(instructions) if turn < len(texts) - 1]
        if not rows:
            break
        between = Batch(
            seed=batch.seed,
            step=batch.step,
            tasks=tuple(asked[row] for row in rows),
            group_ids=tuple(batch.group_ids[tasks[row]] for row in rows),
            group=tuple(range(len(rows))),
            slot=(-1 - turn,) * len(rows),  # a slot that no sample of the group has
        )
        for row, image in zip(rows, edit(between), strict=True):
            if image is not None:
                asked[row] = asked[row].of_image(image)
    return asked
