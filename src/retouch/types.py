"""The nouns of Retouch: what flows between its parts.

Conventions: ``p`` tasks (one per group), ``g`` samples a group, ``b`` rows on this rank (``p * g`` where groups are whole),
``t`` actions (a token, or one transition of a denoising chain). Row ``i`` of everything belongs to sample ``i``; the rows of
a group are contiguous in the global order. Images are ``PIL.Image.Image`` in mode RGB (masks: mode L). Scores are float32
tensors in which NaN means "could not be judged". Nothing here computes, and nothing that is passed on is changed on the way.

This module imports no torch: recipes are read without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """One row of data: what is asked for, and what a judge may need to tell whether it was done.

    ``id`` is unique in its data set and is the group's identity: two rows with equal instructions stay two tasks.
    ``tags`` are what tables are broken down by (``{"complexity": "2"}``); ``meta`` is JSON for a judge that knows the data set.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContents:
    """What the tasks of a data source have: True means every task, False means none, None means that it differs or is not known.

    The fields are those of ``Task``; ``images`` are source images. ``tokens``: source images are image tokens in ``meta``.
    """

    images: bool | None = None
    mask: bool | None = None
    reference: bool | None = None
    target: bool | None = None
    text: bool | None = None
    tokens: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A task and the image made for it: what a judge sees, and all that it may see. ``image`` None: nothing usable was made.

    ``completion``: the text that the policy wrote for it, if it writes text. Only rewards that declare
    ``reads_completions`` receive it.
    """

    task: Task
    image: Image | None
    completion: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows that this rank acts on in one step.

    ``tasks``: the p tasks that occur here; ``group_ids``: their (p,) numbers in the step's global order; row i acts on
    ``tasks[group[i]]`` as member ``slot[i]`` of its group. Every random draw for a row is keyed by
    (seed, step, group_ids[group[i]], slot[i]), so it does not depend on how rows are spread over ranks or chunks.
    """

    seed: int
    step: int
    tasks: tuple[Task, ...]
    group_ids: tuple[int, ...]
    group: tuple[int, ...]
    slot: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.group)

    def take(self, rows: slice) -> "Batch":
        """The given rows, and of the tasks those that they act on."""
        group, slot = self.group[rows], self.slot[rows]
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
    """A part of a trajectory: these rows, these actions. What one microbatch evaluates."""

    rows: slice
    actions: slice


@dataclass(frozen=True, slots=True)
class Needs:
    """What an objective wants from an evaluation beside the log-probabilities."""

    kl: Literal["k3", "closed", "velocity"] | None = None
    entropy: bool = False
    values: bool = False
    log_ratio: Literal["plain", "norm"] = "plain"


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """What the policy under training says of a slice; every column is fp32 and (b, t), with gradient.

    ``log_ratio``: log of new over acting probability (RatioNorm's version where the objective asked for it). ``scale``: a factor
    for the surrogate of each action (RatioNorm's 1 / |dt|, or the weight of a token that another engine drew), without gradient.
    """

    log_probs: Float[Tensor, "b t"]
    log_ratio: Float[Tensor, "b t"]
    kl: Float[Tensor, "b t"] | None = None
    entropy: Float[Tensor, "b t"] | None = None
    values: Float[Tensor, "b t"] | None = None
    scale: Float[Tensor, "b t"] | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trajectory:
    """What a policy did, row by row. A kernel subclasses it with what it needs to evaluate again.

    ``log_probs``: (b, t), fp32, under the policy that acted, computed on exactly the tensors that are stored.
    ``mask``: (b, t), where the policy had a choice. ``kind``: (b, t), see ``Kind``. ``outputs``: what the renderer takes.
    ``values``: (b, t), fp32, what the policy's value head expected before each action, where it has one.
    """

    log_probs: Float[Tensor, "b t"]
    mask: Bool[Tensor, "b t"]
    kind: Int[Tensor, "b t"]
    outputs: Any
    values: Float[Tensor, "b t"] | None = None

    def __len__(self) -> int:
        return int(self.mask.shape[0])

    def take(self, rows: slice | Int[Tensor, " r"]) -> "Trajectory":
        """The given rows of every column, in the given order."""
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
    """What a denoiser is told about each row, encoded once per task.

    ``tensors``: name to a tensor whose axis 0 is rows. ``padded``: the names whose axis 1 is a sequence padded on the right with
    zeros (an embedding and its mask, say); parts with other lengths can then be joined. ``shared``: what all rows have in common
    (sizes in pixels or latents). ``negative``: the same for the unconditional branch of guidance. ``REFERENCE``: the name of an
    embedding (r, d) of the tasks' reference images, where the model is shown them.
    """

    REFERENCE: ClassVar[str] = "reference"

    tensors: Mapping[str, Tensor]
    padded: frozenset[str] = frozenset()
    shared: Mapping[str, Any] = field(default_factory=dict)
    negative: "Conditioning | None" = None

    def take(self, rows: slice | Int[Tensor, " r"]) -> "Conditioning":
        """The given rows; an index tensor may repeat them (embeddings, masks and all in the same order)."""
        return Conditioning(
            {name: tensor[rows] for name, tensor in self.tensors.items()},
            self.padded,
            self.shared,
            None if self.negative is None else self.negative.take(rows),
        )

    @classmethod
    def concat(cls, parts: "Sequence[Conditioning]") -> "Conditioning":
        """The rows of the parts, in order, padded to the longest. Raises ValueError if their shared sizes differ."""
        import torch

        first = parts[0]
        if any(part.shared != first.shared for part in parts):
            raise ValueError(f"rows of different sizes in one batch: {[dict(part.shared) for part in parts]}; bucket them by size")
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
    """What a writer reads before it writes: one row a task, padded on the left, so that every row's last column is a real token.

    ``positions``: on each axis of the rotary embedding, one for text, (time, height, width) for Qwen's vision-language models.
    ``image_inputs``: a mapping for each row, empty where it has no image; tensors of one name are joined along axis 0.
    """

    ids: Int[Tensor, "p l"]
    mask: Bool[Tensor, "p l"]
    positions: Int[Tensor, "p l axes"]
    image_inputs: tuple[Mapping[str, Tensor], ...]

    def __len__(self) -> int:
        return len(self.image_inputs)

    def next_positions(self) -> Int[Tensor, " p"]:
        """The position, equal on all axes, of the first token that is written."""
        return self.positions.masked_fill(~self.mask[..., None], 0).amax((1, 2)) + 1

    def take(self, index: Int[Tensor, " r"]) -> "Prompts":
        """The given rows, which may repeat, without the columns that none of them uses."""
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
    """One completion, as a renderer takes it: the sampled ids without the token that ended it, and their text.

    ``truncated``: it reached the longest length and had not ended. ``key``: the row's (seed, step, group, slot), the key of the
    renderer's noise; None if it was generated without a batch, and then no image can be made of it.
    """

    ids: tuple[int, ...]
    text: str
    truncated: bool
    key: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A named score: its range, whether it may decide anything, and which end of it is the better one.

    The worse end is what a policy's own fault scores. A diagnostic may be NaN if it does not apply, never makes a sample
    missing, and is NaN for a policy's own fault.
    """

    low: float
    high: float
    diagnostic: bool = False
    higher_is_better: bool = True

    @property
    def worst(self) -> float:
        """The worse end of the range."""
        return self.low if self.higher_is_better else self.high


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """A microbatch's share of the loss, and weighted sums for the step's metrics (they add up over microbatches and ranks)."""

    value: Float[Tensor, ""]
    sums: Mapping[str, float | Tensor] = field(default_factory=dict)
    maxima: Mapping[str, float | Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """What one optimizer step learns from: rows of this rank, with advantages and loss weights.

    ``weights`` (b, t) are non-negative and sum to 1 over the minibatch of all ranks; a missing row has weight 0.
    ``seed``, ``step`` and ``epoch`` key the objective's own draws. ``returns``: what a value head learns, where there is one.
    """

    batch: Batch
    trajectory: Trajectory
    advantages: Float[Tensor, "b t"]
    weights: Float[Tensor, "b t"]
    epoch: int = 0
    returns: Float[Tensor, "b t"] | None = None
