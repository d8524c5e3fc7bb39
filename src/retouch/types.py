"""The data types that are passed between the parts of Retouch.

Conventions: ``p`` tasks (one per group), ``g`` samples per group, ``b`` rows on this rank (``p * g`` if groups are not split),
``t`` actions (a token, or one transition of a denoising chain). Row ``i`` of everything belongs to sample ``i``; the rows of
a group are contiguous in the global order. Images are ``PIL.Image.Image`` in mode RGB (masks: mode L). Scores are float64
tensors in which NaN means a missing score. These types compute nothing, and no part changes a value that it was given.

This module imports no torch, because recipes are read without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from ctypes import c_float
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from PIL.Image import Image
    from torch import Tensor

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Scores: TypeAlias = "dict[str, Float[Tensor, ' b']]"
Weights: TypeAlias = Literal["current", "old", "reference"]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One row of data: an instruction, and what a reward may need to score the result.

    ``id`` is unique in its data set and identifies the group: two rows with equal instructions are two tasks.
    ``tags`` are the categories of result tables (``{"complexity": "2"}``); ``meta`` is JSON for rewards that know the data set.
    ``source`` names what the task was made from, for example its source image. Tasks with the same source are one cluster in the
    confidence intervals of an evaluation; a task with "" is a cluster by itself.
    ``chosen`` and ``rejected``: two results of which people preferred the first, for DPO without rollouts.
    ``turns``: the edits of an episode one by one (``rollout.turns``); the task itself describes the whole episode. The first image
    of a turn is the image of the turn before (of the first turn, the task's own), so ``images`` of a turn may be empty.

    Example: ``Task(id="photos/17", instruction="make the sky red", images=(photo,))``
    """

    id: str
    instruction: str
    images: tuple[Image, ...] = ()
    mask: Image | None = None
    reference: Image | None = None
    target: Image | None = None
    text: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    meta: Mapping[str, Json] = field(default_factory=dict)
    chosen: Image | None = None
    rejected: Image | None = None
    source: str = ""
    turns: tuple[Task, ...] = ()

    def copy(self) -> Task:
        """A task that shares nothing that can be changed with this one: no image, list, dictionary, array or tensor."""
        images = [
            image
            for task in (self, *self.turns)
            for image in (*task.images, task.mask, task.reference, task.target, task.chosen, task.rejected)
        ]
        # deepcopy takes these copies, because it would encode and decode an image.
        return deepcopy(self, {id(image): image.copy() for image in images if image is not None})

    def of_image(self, image: Image) -> Task:
        """The task with another first source image. Stored tokens of its source image are left out, because they are of another."""
        meta = {key: value for key, value in self.meta.items() if key != Codes.SOURCE}
        return replace(self, images=(image, *self.images[1:]), meta=meta)

    def with_target(self, image: Image) -> Task:
        """The task with another target image; stored tokens of the former one are left out."""
        return replace(self, target=image, meta={key: value for key, value in self.meta.items() if key != Codes.TARGET})


SplitName: TypeAlias = Literal["train", "validation", "test"]
"""The parts of a data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContents:
    """What the tasks of a data source contain. True: every task; False: no task; None: some tasks, or not known.

    The fields are those of ``Task``; ``images`` are source images. ``tokens``: source images are image tokens in ``meta``.
    ``pairs``: a chosen and a rejected image. ``turns``: the smallest and the largest number of turns of a task; None if unknown.
    """

    images: bool | None = None
    mask: bool | None = None
    reference: bool | None = None
    target: bool | None = None
    text: bool | None = None
    tokens: bool = False
    pairs: bool | None = None
    turns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A task and the image that the policy made for it: everything that a reward may see. ``image``: None if there is no usable
    one.

    ``completion``: the text that the policy generated, if any. Only rewards that declare ``reads_completions`` receive it.
    """

    task: Task
    image: Image | None
    completion: str | None = None

    def copy(self) -> Sample:
        """A sample that shares nothing that can be changed with this one."""
        return Sample(self.task.copy(), None if self.image is None else self.image.copy(), self.completion)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of this rank in one step.

    ``tasks``: the p tasks of these rows. ``group_ids``: their numbers (p,) in the global order of the step; tasks that replace
    others (``rollout.refill``) have higher ones. Row i belongs to ``tasks[group[i]]`` and is sample ``slot[i]`` of its group. Every
    random draw for a row is keyed by (seed, step, group_ids[group[i]], slot[i]), those of an action by its number too, and a draw
    that a group shares has no slot. So none depends on how rows are distributed over ranks or chunks.
    """

    seed: int
    step: int
    tasks: tuple[Task, ...]
    group_ids: tuple[int, ...]
    group: tuple[int, ...]
    slot: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.group)

    def take(self, rows: slice | Sequence[int]) -> "Batch":
        """The given rows, in the given order, with only their tasks."""
        chosen = range(len(self))[rows] if isinstance(rows, slice) else rows
        group, slot = tuple(self.group[row] for row in chosen), tuple(self.slot[row] for row in chosen)
        kept = sorted(set(group))
        place = {old: new for new, old in enumerate(kept)}
        return Batch(
            seed=self.seed,
            step=self.step,
            tasks=tuple(self.tasks[k] for k in kept),
            group_ids=tuple(self.group_ids[k] for k in kept),
            group=tuple(place[k] for k in group),
            slot=slot,
        )


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a trajectory, given by rows and actions; the unit that one microbatch evaluates."""

    rows: slice
    actions: slice


@dataclass(frozen=True, slots=True)
class Needs:
    """What an objective needs from an evaluation in addition to log-probabilities."""

    kl: Literal["k3", "closed", "velocity"] | None = None
    entropy: bool = False
    values: bool = False
    log_ratio: Literal["plain", "norm"] = "plain"
    step_weights: Literal["equal", "noise"] = "equal"
    divergence: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Lesson:
    """What a teacher sees of a batch, for ``TaughtPolicy.teach``.

    ``weights``: the name of its weight copy or model. ``inputs``: the conditioning or the prompts of its tasks. ``places``: (p,),
    for each task of the batch its row in ``inputs``, or -1 if another teacher teaches it. ``guidance_scale``: None: the policy's.
    """

    weights: str
    inputs: Any
    places: Int[Tensor, " p"]
    guidance_scale: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The evaluation of a slice under the current weights; all tensors are fp32 and (b, t), with gradient.

    ``log_ratio``: log of the current probability divided by the acting probability, normalised by RatioNorm (arXiv 2510.22319) if
    the objective needs that. ``scale``: a factor for the surrogate of each action, without gradient: RatioNorm's 1 / |dt|, the
    weight of the action's step by its noise, or the importance weight of an action that an engine sampled. ``divergence``: the KL
    of the acting policy to the current one, without gradient: of the Gaussian step, or of sampling this token or another one."""

    log_probs: Float[Tensor, "b t"]
    log_ratio: Float[Tensor, "b t"]
    kl: Float[Tensor, "b t"] | None = None
    entropy: Float[Tensor, "b t"] | None = None
    values: Float[Tensor, "b t"] | None = None
    scale: Float[Tensor, "b t"] | None = None
    divergence: Float[Tensor, "b t"] | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trajectory:
    """The result of a rollout, row by row. Each policy subclasses it with the tensors that its evaluation needs.

    ``log_probs``: (b, t), fp32, under the acting policy, computed on exactly the stored tensors. ``mask``: (b, t), True for actions
    that the policy chose. ``kind``: (b, t), see ``Kind``. ``outputs``: the input of the renderer. ``values``: (b, t), fp32, the
    value head's prediction before each action, if there is a value head. ``behaviour_log_probs``: (b, t), fp32, under an engine
    that sampled the actions with other numerics than the policy; None if the actions were sampled with ``log_probs``."""

    log_probs: Float[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]
    kind: Int[Tensor, "b t"]
    outputs: Any
    values: Float[Tensor, "b t"] | None = None
    behaviour_log_probs: Float[Tensor, "b t"] | None = None

    def __len__(self) -> int:
        return int(self.mask.shape[0])

    def with_log_probs(self, log_probs: Float[Tensor, "b t"]) -> "Trajectory":
        """The same actions with the log-probabilities of other weights.

        ``behaviour_log_probs`` are shifted by the same amount, so that the importance weight of the engine's mismatch is unchanged.
        """
        behaviour = self.behaviour_log_probs
        shifted = None if behaviour is None else behaviour + (log_probs - self.log_probs)
        return replace(self, log_probs=log_probs, behaviour_log_probs=shifted)

    def take(self, rows: slice | Int[Tensor, " r"]) -> "Trajectory":
        """The given rows of all tensors, in the given order."""
        raise NotImplementedError

    @classmethod
    def concat(cls, parts: "Sequence[Trajectory]") -> "Trajectory":
        """The rows of the parts, in order."""
        raise NotImplementedError


class Kind:
    """Values of ``Trajectory.kind``. ``IMAGE``: a whole image counts as one action without a log-probability (NaN)."""

    TEXT_TOKEN = 0
    IMAGE_TOKEN = 1
    TRANSITION = 2
    IMAGE = 3


class Codes:
    """Keys of a task's ``meta``: its images as image tokens (rows of codes), and the reasoning text before the image."""

    SOURCE = "source_codes"
    TARGET = "target_codes"
    THOUGHT = "thought"


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """The inputs of a denoiser for each row besides the latent, encoded once per task.

    ``tensors``: tensors by name, with rows on axis 0. ``padded``: names of the tensors whose axis 1 is a sequence padded on the
    right with zeros (for example an embedding and its mask), so rows of different lengths can be concatenated. ``shared``: values
    that all rows have in common, such as sizes. ``negative``: the conditioning of the unconditional branch of guidance.
    ``REFERENCE``: the name of the embedding (r, d) of the tasks' reference images, for models that use them."""

    REFERENCE: ClassVar[str] = "reference"

    tensors: Mapping[str, Tensor]
    padded: frozenset[str] = frozenset()
    shared: Mapping[str, Any] = field(default_factory=dict)
    negative: "Conditioning | None" = None

    def take(self, rows: slice | Int[Tensor, " r"]) -> "Conditioning":
        """The given rows of all tensors; an index tensor may repeat rows."""
        return Conditioning(
            {name: tensor[rows] for name, tensor in self.tensors.items()},
            self.padded,
            self.shared,
            None if self.negative is None else self.negative.take(rows),
        )

    @classmethod
    def concat(cls, parts: "Sequence[Conditioning]") -> "Conditioning":
        """The rows of the parts, in order, padded to the longest. Raises ValueError if their ``shared`` values differ."""
        import torch

        first = parts[0]
        other = next((part for part in parts if part.shared != first.shared), None)
        if other is not None:
            raise ValueError(
                f"rows of different sizes in one batch: {dict(first.shared)} and {dict(other.shared)}; set policy.model.size (in "
                "Python: size=) so that all images have one size, and give all tasks the same number of source images"
            )
        joined = {}
        for name in first.tensors:
            tensors = [part.tensors[name] for part in parts]
            if name in first.padded:
                longest = max(tensor.shape[1] for tensor in tensors)
                tensors = [
                    torch.cat([tensor, tensor.new_zeros(tensor.shape[0], longest - tensor.shape[1], *tensor.shape[2:])], dim=1)
                    for tensor in tensors
                ]
            joined[name] = torch.cat(tensors)
        negatives = [part.negative for part in parts if part.negative is not None]
        return cls(joined, first.padded, first.shared, cls.concat(negatives) if negatives else None)


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The prompts of a language model: one row per task, padded on the left, so that the last column has no padding.

    ``positions``: positions on each axis of the rotary embedding: one axis for text, (time, height, width) for Qwen's
    vision-language models. ``image_inputs``: tensors by name for each row, empty for rows without images; joined along axis 0 for a
    forward pass."""

    ids: Int[Tensor, "p l"]
    mask: Bool[Tensor, "p l"]
    positions: Int[Tensor, "p l axes"]
    image_inputs: tuple[Mapping[str, Tensor], ...]

    def __len__(self) -> int:
        return len(self.image_inputs)

    def next_positions(self) -> Int[Tensor, " p"]:
        """The position of the first generated token, the same on all axes."""
        return self.positions.masked_fill(~self.mask[..., None], 0).amax((1, 2)) + 1

    def take(self, index: Int[Tensor, " r"]) -> "Prompts":
        """The given rows, which may repeat, without columns that are padding in all of them."""
        mask = self.mask[index]
        first = int(mask.any(0).int().argmax())
        image_inputs = tuple(self.image_inputs[row] for row in index.tolist())
        return Prompts(self.ids[index, first:], mask[:, first:], self.positions[index, first:], image_inputs)

    @classmethod
    def concat(cls, parts: "Sequence[Prompts]") -> "Prompts":
        """The rows of the parts, in order, padded to the longest."""
        import torch

        longest = max(part.ids.shape[1] for part in parts)

        def padded(tensor: Tensor) -> Tensor:
            missing = longest - tensor.shape[1]
            return torch.cat([tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:]), tensor], dim=1)

        return cls(
            torch.cat([padded(part.ids) for part in parts]),
            torch.cat([padded(part.mask) for part in parts]),
            torch.cat([padded(part.positions) for part in parts]),
            tuple(row for part in parts for row in part.image_inputs),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion as the input of a renderer: the sampled ids without the end token, and their text.

    ``truncated``: it reached the maximum length without an end token. ``key``: the row's (seed, step, group, slot), which keys the
    renderer's noise; None if it was generated without a batch, so that it cannot be rendered.
    """

    ids: tuple[int, ...]
    text: str
    truncated: bool
    key: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A named score of a reward: its range from ``low`` to ``high``, and which end is better.

    A policy's own fault gets the worse end. A ``diagnostic`` column is only logged: it may be NaN if it does not apply, never makes
    a reward missing, and is NaN for a policy's own fault."""

    low: float
    high: float
    diagnostic: bool = False
    higher_is_better: bool = True

    @property
    def worst(self) -> float:
        """The worse end of the range."""
        return self.low if self.higher_is_better else self.high

    @property
    def limits(self) -> tuple[float, float]:
        """The range, widened to the float32 values that are nearest to its ends, because many rewards compute in float32."""
        return min(self.low, c_float(self.low).value), max(self.high, c_float(self.high).value)

    def contains(self, value: float) -> bool:
        """Whether a value is in the range, up to the rounding of scores to float32."""
        low, high = self.limits
        return low <= value <= high


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """A microbatch's share of the loss, and its contributions to the step's metrics: ``sums`` are added over microbatches and
    ranks; of ``maxima``, the largest is taken."""

    value: Float[Tensor, ""]
    sums: Mapping[str, float | Tensor] = field(default_factory=dict)
    maxima: Mapping[str, float | Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """The rows of this rank in one optimizer step, with advantages and loss weights.

    ``weights`` (b, t) are non-negative; a row with a missing reward has weight 0. ``weight_sum``: their sum over the minibatch of
    all ranks, before an advantage that weighs rows is multiplied into them. It is 1; if the objective's ``loss_weights`` is
    "dr_grpo", it is the mean number of trained actions of a row divided by the largest possible number. ``epoch``, with
    ``batch.seed`` and ``batch.step``, keys the objective's own random draws. ``returns``: the targets of a value head, if there is
    one."""

    batch: Batch
    trajectory: Trajectory
    advantages: Float[Tensor, "b t"]
    weights: Float[Tensor, "b t"]
    epoch: int = 0
    returns: Float[Tensor, "b t"] | None = None
    weight_sum: float = 1.0
