"""The nouns of Retouch and the protocols between its parts.

Conventions: ``p`` tasks (one per group), ``g`` samples a group, ``b`` rows on this rank (``p * g`` where groups are whole),
``t`` actions (a token, or one transition of a denoising chain). Row ``i`` of everything belongs to sample ``i``; the rows of
a group are contiguous in the global order. Images are ``PIL.Image.Image`` in mode RGB (masks: mode L). Scores are float32
tensors in which NaN means "could not be judged". Nothing here computes, and nothing that is passed on is changed on the way.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from PIL.Image import Image
from torch import Tensor, nn

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Scores: TypeAlias = dict[str, Float[Tensor, " b"]]
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


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A task and the image made for it: what a judge sees, and all that it may see. ``image`` None: nothing usable was made.

    ``written``: what the policy wrote for it, where it writes. It is for rewards of the text itself; nobody else is shown it.
    """

    task: Task
    image: Image | None
    written: str | None = None


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
    """Values of ``Trajectory.kind``. ``PICTURE``: a whole picture counts as one action without a log-probability (NaN)."""

    TEXT_TOKEN = 0
    IMAGE_TOKEN = 1
    TRANSITION = 2
    PICTURE = 3


class Codes:
    """Keys of a task's ``meta``: its pictures as image tokens, rows of codes, and what is thought before one is drawn."""

    SOURCE = "source_codes"
    TARGET = "target_codes"
    THOUGHT = "thought"


@dataclass(frozen=True, slots=True, eq=False)
class Conditioning:
    """What a denoiser is told about each row, encoded once per task.

    ``tensors``: name to a tensor whose axis 0 is rows. ``padded``: the names whose axis 1 is a sequence padded on the right with
    zeros (an embedding and its mask, say); parts with other lengths can then be joined. ``shared``: what all rows have in common
    (sizes in pixels or latents). ``negative``: the same for the unconditional branch of guidance. ``REFERENCE``: the name of an
    embedding (r, d) of the tasks' reference pictures, where the model is shown them.
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
        """The rows of the parts, in order, padded to the longest. ValueError where their shared sizes differ."""
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


@runtime_checkable
class DenoisingModel(Protocol):
    """A flow-matching model as the denoising kernel sees it. It knows no RL and no loop.

    ``x`` is in the layout the transformer takes (packed tokens for Qwen and Flux, (c, h, w) for SD3), fp32; sigma runs 1 to 0.
    """

    module: nn.Module  # the transformer, the only trainable part

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        """Each task's conditioning: p rows. Without gradient, frozen parts in eval mode."""
        ...

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        """The unconditional branch for each task (empty or negative prompt, same source images): p rows."""
        ...

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """The guided velocity, as the model's diffusers pipeline makes it."""
        ...

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r ..."]:
        """Standard normal x at sigma 1, row i from generator i, drawn in the order in which the diffusers pipeline draws it."""
        ...

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        """The pipeline's schedule, from its first sigma (about 1) to 0."""
        ...

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r ..."], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r ..."]:
        """noise - data in fp32; ``module`` is the transformer, perhaps wrapped by a stepper."""
        ...

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        """Clean x for pictures (mode of the VAE's posterior, normalised): targets of supervised learning."""
        ...

    def decode(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> list[Image]:
        """Pictures for clean x."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """What a writer reads before it writes: one row a task, padded on the left, so that every row's last column is a real token.

    ``positions``: on each axis of the rotary embedding, one for text, (time, height, width) for Qwen's vision-language models.
    ``pictures``: a mapping for each row, empty where it has no picture; tensors of one name are joined along axis 0.
    """

    ids: Int[Tensor, "p l"]
    mask: Bool[Tensor, "p l"]
    positions: Int[Tensor, "p l axes"]
    pictures: tuple[Mapping[str, Tensor], ...]

    def __len__(self) -> int:
        return len(self.pictures)

    def next_positions(self) -> Int[Tensor, " p"]:
        """The position, equal on all axes, of the first token that is written."""
        return self.positions.masked_fill(~self.mask[..., None], 0).amax((1, 2)) + 1

    def take(self, index: Int[Tensor, " r"]) -> "Prompts":
        """The given rows, which may repeat, without the columns that none of them uses."""
        mask = self.mask[index]
        first = int(mask.any(0).int().argmax())
        pictures = tuple(self.pictures[row] for row in index.tolist())
        return Prompts(self.ids[index, first:], mask[:, first:], self.positions[index, first:], pictures)

    @classmethod
    def concat(cls, parts: "Sequence[Prompts]") -> "Prompts":
        """The rows of the parts, in order, padded to the longest."""
        longest = max(part.ids.shape[1] for part in parts)

        def padded(tensor: Tensor) -> Tensor:
            missing = longest - tensor.shape[1]
            return torch.cat([tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:]), tensor], dim=1)

        return cls(
            torch.cat([padded(part.ids) for part in parts]),
            torch.cat([padded(part.mask) for part in parts]),
            torch.cat([padded(part.positions) for part in parts]),
            tuple(row for part in parts for row in part.pictures),
        )


@dataclass(frozen=True, slots=True)
class Written:
    """One completion, as a renderer takes it: the sampled ids without the token that ended it, and their text.

    ``cut_off``: it reached the longest length and had not ended. ``key``: the row's (seed, step, group, slot), by which a renderer
    keys its own draws; None where it was made without a batch, and then it can be read and not drawn.
    """

    ids: tuple[int, ...]
    text: str
    cut_off: bool
    key: tuple[int, int, int, int] | None = None


@runtime_checkable
class Grammar(Protocol):
    """Which tokens may follow which: part of the distribution, in sampling and in evaluation alike.

    ``vocabularies``: a few sets of ids, True where an id may be drawn. ``kinds``: the ``Kind`` of each set's tokens.
    """

    vocabularies: Bool[Tensor, "s v"]
    kinds: tuple[int, ...]

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k_plus_1"], Int[Tensor, "r k_plus_1"]]:
        """For each place of rows that have written ``ids``, and for the next place: the number of the set that its token is drawn
        from, and the id that is forced there (-1: none, the token is drawn). A place depends on what stands before it alone."""
        ...


@runtime_checkable
class AutoregressiveModel(Protocol):
    """A causal language model, perhaps with eyes, as the autoregressive kernel sees it. It knows no RL and no loop.

    A state is the last hidden state after the final norm; the state *before* a token is the one whose logits it is drawn from.
    ``stop``: ids that end a completion; ``pad``: what stands after the end. ``shares_prompts``: caches carry a gradient, so that an
    evaluation can read a prompt once for all its rows; where they do not (gradient checkpointing), rows are read whole.
    ``module`` may be wrapped by a stepper.
    """

    module: nn.Module
    grammar: Grammar
    shares_prompts: bool
    stop: tuple[int, ...]
    pad: int

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """Each task's prompt: p rows. Without gradient, frozen parts in eval mode."""
        ...

    def prefill(self, module: nn.Module, prompts: Prompts) -> tuple[Float[Tensor, "p d"], Any]:
        """The state before each row's first token, and a cache of the prompts."""
        ...

    def extend(
        self,
        module: nn.Module,
        ids: Int[Tensor, "r k"],
        *,
        mask: Bool[Tensor, "r l_plus_k"],
        positions: Int[Tensor, "r k"],
        cache: Any,
    ) -> Float[Tensor, "r k d"]:
        """The states after k more tokens, which are added to the cache; ``mask`` covers what the cache has and them."""
        ...

    def select(self, cache: Any, rows: Int[Tensor, " r"]) -> Any:
        """The cache of the given rows, which may repeat; the one that was handed in is used up."""
        ...

    def states(
        self, module: nn.Module, prompts: Prompts, ids: Int[Tensor, "r k"], mask: Bool[Tensor, "r k"]
    ) -> Float[Tensor, "r k d"]:
        """The states before each of k tokens, in one forward without a cache (so with gradient checkpointing, where it is on)."""
        ...

    def logits(self, module: nn.Module, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """The head alone, in fp32, so that the kernel decides how many places have their logits at once."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


@runtime_checkable
class Policy(Protocol):
    """What gets the gradient. It acts and evaluates; it does not own the optimizer."""

    module: nn.Module  # trainable; a stepper may replace it by its wrapped self, and every forward with gradient goes through it

    def rollout(self, batch: Batch) -> Trajectory:
        """Act on every row of the batch, without gradient."""
        ...

    def sample(self, batch: Batch) -> Trajectory:
        """Act as the end user would: deterministic given the row's key, averaged weights where there are any, no exploration."""
        ...

    def microbatches(self, trajectory: Trajectory) -> Iterator[Slice]:
        """Slices that cover every row and action once, each small enough to evaluate at once; equally many on every rank."""
        ...

    def evaluate(self, trajectory: Trajectory, part: Slice, needs: Needs) -> Evaluation:
        """Evaluate the slice under the current weights, with gradient."""
        ...


@runtime_checkable
class VelocityPolicy(Policy, Protocol):
    """A denoising policy as NFT, AWM, DPO and supervised flow matching see it: a velocity field under three sets of weights."""

    def demonstrate(self, batch: Batch) -> Trajectory:
        """The tasks' own targets, encoded as outputs: what supervised learning imitates."""
        ...

    def row_slices(self, trajectory: Trajectory) -> Iterator[slice]:
        """Slices that cover every row once, each small enough for one forward with gradient."""
        ...

    def velocity(
        self, trajectory: Trajectory, rows: slice, x: Float[Tensor, "r ..."], sigma: Float[Tensor, " r"], weights: Weights
    ) -> Float[Tensor, "r ..."]:
        """noise - data at ``x`` for these rows under the trajectory's conditioning; with gradient only under current weights."""
        ...

    def follow_old(self, decay: float) -> None:
        """Move the old weights towards the current ones: old = decay * old + (1 - decay) * current."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """The frozen way from a policy's outputs to pixels."""

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image | None]:
        """One image a row; None where the output cannot be drawn, which is the policy's own fault."""
        ...


@dataclass(frozen=True, slots=True)
class Column:
    """A named score: its range, whether it may decide anything, and which end of it is the better one.

    The worse end is what a policy's own fault scores. A diagnostic may be NaN where it does not apply, never makes a sample
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


@runtime_checkable
class Reward(Protocol):
    """Judges samples. ``columns`` declares the scores; calling returns each as (b,), NaN where it could not judge."""

    columns: Mapping[str, Column]

    def __call__(self, samples: Sequence[Sample]) -> Scores: ...


@runtime_checkable
class AsyncReward(Reward, Protocol):
    """A reward that can judge while sampling goes on."""

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]": ...


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


@runtime_checkable
class Objective(Protocol):
    """Turns (policy, trajectory, advantages) into a loss, microbatch by microbatch."""

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        """The shares of the loss, one by one (backward runs before the next is asked for); equally many on every rank."""
        ...

    def after_step(self, policy: Any, step: int) -> None:
        """Called after each optimizer step: NFT moves its old policy here. Most objectives do nothing."""
        ...
