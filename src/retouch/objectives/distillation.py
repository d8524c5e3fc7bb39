"""On-policy distillation: the policy samples, and learns in each state that it reaches what a teacher would do there."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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
    """Folder or Hugging Face id of another model of the policy's family, such as a larger one. The denoiser of a pipeline teaches
    with the policy's text encoders and autoencoder, which must be the same; a language model needs the policy's vocabulary. It is
    stored as ``policy.base`` says for the policy's frozen weights, and is in CPU memory while it does not teach."""
    guidance_scale: Annotated[float, Field(ge=1.0)] | None = None
    """The teacher's scale of classifier-free guidance; null means that of the rollout."""
    instructions: str | None = None
    """The key of the tasks' ``meta`` with what the teacher reads in place of the instruction: a text, such as a better prompt, or a
    list of texts. It follows a list one after the other, each on the image before, so a model that makes single edits well teaches
    itself to make several at once."""

    @property
    def weights(self) -> str:
        """The name of its weights. It follows from their path: in another phase, another teacher may have the name of this one."""
        path = self.run or self.model
        return "reference" if path is None else f"teacher-{hashlib.sha256(path.encode()).hexdigest()[:12]}"

    def texts(self, task: Task) -> list[str]:
        """What the teacher reads for a task. Raises ValueError if it is missing or no text."""
        assert self.instructions is not None
        found = task.meta.get(self.instructions)
        texts = [found] if isinstance(found, str) else found
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            what = f"the teacher's instructions are a text or a list of texts, and it is {found!r}"
            raise ValueError(f"task {task.id!r}: meta[{self.instructions!r}]: {what}; see objective.teachers")
        return [str(text) for text in texts]


class Taught(Objective):
    """Base class of objectives that learn from teachers, which are in ``taught_by``."""

    @property
    def weight_copies(self) -> frozenset[str]:
        return frozenset(teacher.weights for teacher in self.taught_by.values() if teacher.model is None)

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        yield from super().problems(context)
        for name, teacher in self.taught_by.items():
            key = f"{context.objective}.{name}"
            if not (teacher.run or teacher.model or teacher.guidance_scale or teacher.instructions):
                same = "it is the policy before training with the same inputs, so there is nothing to learn"
                yield f"{key}: {same}; set run, model, guidance_scale or instructions"
            if teacher.run is not None and teacher.model is not None:
                yield f"{key}.model: run names other weights of the policy's own model; give one of the two"
            if teacher.guidance_scale is not None and context.is_autoregressive:
                yield f"{key}.guidance_scale: tokens are sampled without guidance; remove it"
            if context.sharded and teacher.instructions:
                why = "with sharding fsdp2 all ranks must call the model equally often, and tasks have different numbers of them"
                yield f"{key}.instructions: {why}; use sharding null or zero2"


class OPD(Taught):
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
    def taught_by(self) -> Mapping[str, Teacher]:  # type: ignore[override]
        return {f"teachers.{name}": teacher for name, teacher in self.teachers.items()}

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
                asked, scale = last_edits(policy, teacher, batch, tasks), teacher.guidance_scale
                places = minibatch.weights.new_full((len(batch.tasks),), -1, dtype=torch.long)
                places[tasks] = torch.arange(len(tasks), device=places.device)
                inputs = policy.teacher_inputs(asked, weights=teacher.weights, guidance_scale=scale)
                lessons.append(Lesson(weights=teacher.weights, inputs=inputs, places=places, guidance_scale=scale))
        taught = policy.teach(minibatch.trajectory, lessons)
        for part in policy.microbatches(minibatch.trajectory):
            divergence = policy.divergence(minibatch.trajectory, part, taught, forward=self.kl == "forward")
            value = (minibatch.weights[part.rows, part.actions] * divergence).sum()
            yield Loss(value, {"policy/loss": value.detach()})

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        yield from super().problems(context)
        if len(self.teachers) > 1 and self.by is None:
            yield f"{context.objective}.by: there are {len(self.teachers)} teachers; name the tag of the tasks that chooses one"
        if context.sharded and self.by is not None:
            why = "with sharding fsdp2 all ranks must call the model equally often, and the number of a teacher's tasks differs"
            yield f"{context.objective}.by: {why}; use sharding null or zero2"
        if context.engine and not context.stochastic:
            yield f"{context.rollout}.engine: an engine returns no state of a deterministic chain, which opd needs; remove it"


def last_edits(policy: TaughtPolicy, teacher: Teacher, batch: Batch, numbers: Sequence[int]) -> list[Task]:
    """The tasks with these numbers as the teacher sees them. Of several instructions, it follows all but the last one by itself,
    each on the image before; it then sees the image so far and the last instruction."""
    asked = [batch.tasks[number] for number in numbers]
    if teacher.instructions is None:
        return asked
    instructions = [teacher.texts(task) for task in asked]
    for turn in range(max(map(len, instructions))):
        asked = [
            replace(task, instruction=texts[min(turn, len(texts) - 1)]) for task, texts in zip(asked, instructions, strict=True)
        ]
        rows = [row for row, texts in enumerate(instructions) if turn < len(texts) - 1]
        if rows:
            images = edited(policy, teacher, batch, [numbers[row] for row in rows], [asked[row] for row in rows], turn=turn)
            for row, image in zip(rows, images, strict=True):
                if image is not None:
                    asked[row] = asked[row].of_image(image)
    return asked


def edited(
    policy: TaughtPolicy, teacher: Teacher, batch: Batch, numbers: Sequence[int], asked: Sequence[Task], *, turn: int
) -> Sequence[Image | None]:
    """The teacher's image of each of these tasks; ``numbers``: their numbers in the batch, whose noise differs by ``turn``."""
    rows = Batch(
        seed=batch.seed,
        step=batch.step,
        tasks=tuple(asked),
        group_ids=tuple(batch.group_ids[number] for number in numbers),
        group=tuple(range(len(asked))),
        slot=(-1 - turn,) * len(asked),  # a slot that no sample of the group has
    )
    return policy.teacher_images(rows, weights=teacher.weights, guidance_scale=teacher.guidance_scale)
