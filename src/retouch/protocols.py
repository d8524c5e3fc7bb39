"""The seams of Retouch: the protocols through which its parts know each other.

A model knows no reinforcement learning, a policy no reward, a reward no policy, and an objective no model. Axes are those of
``retouch.types``. This module imports no torch: recipes are read without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from retouch.types import (
    Batch,
    Column,
    Conditioning,
    Evaluation,
    Loss,
    Minibatch,
    Needs,
    Prompts,
    Sample,
    Scores,
    Slice,
    Task,
    Trajectory,
    Weights,
)

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float, Int
    from PIL.Image import Image
    from torch import Tensor, nn


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
        """Clean x for images (mode of the VAE's posterior, normalised): targets of supervised learning."""
        ...

    def decode(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> list[Image]:
        """Images for clean x."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """Which tokens may follow which: part of the distribution, in sampling and in evaluation alike.

    ``vocabularies``: a few sets of ids, True if an id may be drawn. ``kinds``: the ``Kind`` of each set's tokens.
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
        """One image a row; None if the output cannot be drawn, which is the policy's own fault."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Judges samples. ``columns`` declares the scores; calling returns each as (b,), NaN if it could not judge."""

    @property
    def columns(self) -> Mapping[str, Column]: ...

    def __call__(self, samples: Sequence[Sample]) -> Scores: ...


@runtime_checkable
class AsyncReward(Reward, Protocol):
    """A reward that can judge while sampling goes on."""

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]": ...


@runtime_checkable
class SupportsLosses(Protocol):
    """What the loop drives: an objective (``retouch.objectives.base.Objective``), or anything else that yields losses."""

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        """This rank's shares of the loss, one per microbatch; backward runs before the next one. Equally many on every rank."""
        ...

    def after_step(self, policy: Any, step: int) -> None:
        """Called after each optimizer step."""
        ...


@runtime_checkable
class Collectives(Protocol):
    """The ranks of a run as an advantage sees them. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Equal-length rows of every rank, in the order of ranks: (n, ...) to (world * n, ...), on the CPU."""
        ...
