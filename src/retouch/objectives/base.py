"""What every objective is: a section of the recipe that turns a minibatch into losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.config.section import Count, NonNegative, Positive, Section

if TYPE_CHECKING:
    import torch

    from retouch.protocols import SupportsLosses
    from retouch.types import Batch, Loss, Minibatch, Scores, Trajectory


class ValueHead(Section):
    """A small network that predicts the reward before each action. It is not part of what is exported."""

    learning_rate: Positive = 3e-3
    """Learning rate of the head, constant over the run; the policy has the optimizer's."""
    clip: Positive | None = 0.2
    """PPO's value clip: largest change of a value within a step, on a scale where rewards run from -1 to 1; null does not clip."""
    width: Count = 128
    """Width of its hidden layer."""
    coefficient: NonNegative = 0.0
    """Weight of the value loss in the gradient of a language model's own weights; with 0 only the head learns from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveContext:
    """What an objective may know of the rest of its recipe when it checks itself. Keys are paths in the recipe, for messages.

    ``objective``, ``rollout``: the keys of the two sections. ``model``: kind of the policy's model. ``writes_tokens``: actions are
    tokens, otherwise transitions of a denoising chain. ``token_kinds``: kinds of tokens that the model writes ("text", "vision"),
    None if unknown. ``stochastic``: transitions have log-probabilities. ``noise_level``: of the transitions, None if there is none.
    ``reduction``: of a transition's log-probability, or "token". ``actions``: of a row, None if unknown. ``microbatch``: the
    recipe's. ``optimizer_steps``: per rollout. ``lora_dropout``: (key, value), None without a LoRA.
    ``num_steps``: of a denoising chain. ``engine``: something else than the policy samples. ``offload``: the autoencoder waits in
    CPU memory.
    """

    objective: str
    rollout: str
    model: str
    writes_tokens: bool
    token_kinds: frozenset[str] | None
    stochastic: bool
    noise_level: float | None
    reduction: Literal["mean", "sum", "token"]
    actions: int | None
    microbatch: int
    optimizer_steps: int
    lora_dropout: tuple[str, float] | None
    num_steps: int | None = None
    engine: bool = False
    offload: bool = False


class Objective(Section):
    """Base of all objectives, built in or your own. Override ``losses``; everything else has a default.

    Fields of the subclass are the keys of its section. An objective sees the policy through ``retouch.protocols.Policy`` (or
    ``VelocityPolicy``) and the rows through ``Minibatch``; it does not know the model, the reward or the number of ranks.
    """

    imitates: ClassVar[bool] = False
    """It learns from the tasks' own images or completions: no rollout, no reward, no advantage."""
    needs_pairs: ClassVar[bool] = False
    """Every task must have a chosen and a rejected image, and the two rows of its group are these images."""
    acts_with: ClassVar[Literal["current", "old"]] = "current"
    """Weights under which the rollout acts."""
    needs_velocities: ClassVar[bool] = False
    """It calls ``VelocityPolicy.velocity``, so it is for denoising policies only."""
    needs_log_probs: ClassVar[bool] = False
    """It calls ``Policy.evaluate``, so the rollout's actions must have log-probabilities."""
    learns_from_pairs: ClassVar[bool] = False
    """It compares rows of one group within a minibatch."""
    needs_both_signs: ClassVar[bool] = False
    """It learns from bad samples too, which it knows by their negative or lowest advantages."""

    differentiates_reward: ClassVar[bool] = False
    """Its loss is the score of a reward of its own, with gradient through the end of a denoising chain. It uses no advantages;
    ``rewards``, ``load`` and ``first_gradient_step`` are for such an objective."""

    has_value_loss: ClassVar[bool] = False
    """``build`` adds a value loss where a value head trains (advantage ``gae``)."""
    for_tokens: ClassVar[str] = "policy_gradient"
    """The kind that messages recommend where the policy writes tokens and this objective needs velocities."""

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        """This rank's shares of the loss, one per microbatch; backward runs before the next one is computed.

        ``minibatch.advantages`` and ``minibatch.weights`` are (b, t); the weights of all ranks' rows sum to 1, so a loss is
        ``(weights * loss_per_action).sum()``. Every rank must yield equally many shares.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no losses")

    def demonstrate(self, policy: Any, batch: Batch) -> Trajectory:
        """The trajectory of an objective that ``imitates``: by default the tasks' targets, encoded."""
        trajectory: Trajectory = policy.demonstrate(batch)
        return trajectory

    @property
    def heldout_columns(self) -> Mapping[str, Literal["share", "mean"]]:
        """The columns that ``measure`` adds to an evaluation. ``share``: values are 1 (yes), 0 (no) and 0.5 (undecided), and the
        interval is that of a share (Wilson)."""
        return {}

    def measure(self, policy: Any, batch: Batch) -> Scores:
        """What this objective measures of held-out tasks, without images and reward: one number per task and column.

        The batch has two rows per task, slots 0 and 1.
        """
        raise NotImplementedError(f"{type(self).__name__} measures no {', '.join(self.heldout_columns)}")

    def for_trial(self) -> Objective:
        """The objective of the trial step before a run, which must have a gradient whatever the samples are. It is asked only of
        an objective that ``differentiates_reward``."""
        return self

    def after_step(self, policy: Any, step: int) -> None:
        """Called after optimizer step ``step`` (from 1) of the phase."""

    @property
    def rewards(self) -> Mapping[str, Section]:
        """Sections of the rewards that it differentiates, by their keys."""
        return {}

    def load(self, device: torch.device | str) -> None:
        """Load what the loss needs besides the policy. Called before the policy is loaded. ``device``: the run's for rewards.

        ValueError: weights or packages are not there.
        """

    def first_gradient_step(self, num_steps: int, *, seed: int, step: int) -> int:
        """The step of a denoising chain of ``num_steps`` from which the loss continues it with gradient, in training step ``step``;
        the rollout keeps the state before it. It must be the same on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} continues no chain")

    def build(self, *, entropy: bool = False, value_head: ValueHead | None = None) -> SupportsLosses:
        """What the loop drives. ``entropy``: also measure the entropy of tokens. ``value_head``: a value head trains with it."""
        return self

    @property
    def weight_copies(self) -> frozenset[str]:
        """Weights to keep besides the current ones: "reference" (at the start of the phase), "old" (a trailing copy)."""
        return frozenset()

    @property
    def needs_acting_means(self) -> bool:
        """Whether the rollout must store the mean of each transition."""
        return False

    @property
    def kl_kind(self) -> Literal["k3", "closed", "velocity"] | None:
        """The KL to the reference that the loss contains."""
        return None

    @property
    def has_ratio(self) -> bool:
        """Whether the loss depends on the ratio of current to acting probability, which must be 1 before the first step."""
        return False

    @property
    def one_ratio_per_row(self) -> bool:
        """Whether all actions of a row share one ratio, so that they cannot have advantages of their own."""
        return False

    @property
    def loss_weights(self) -> Literal["sequence", "token", "dr_grpo"]:
        """How actions share the loss (see ``core/weights.py``)."""
        return "sequence"

    def trained_kinds(self, step: int) -> Sequence[int] | None:
        """Kinds of actions (``retouch.types.Kind``) that train in step ``step`` of the phase, from 0; None is all."""
        return None

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        """A line for everything in the recipe that this objective cannot work with, as "key: mistake; what to do"."""
        if self.needs_velocities and context.writes_tokens:
            why = f"{self.label} learns velocities, and a policy of tokens has none"
            yield f"{context.objective}.kind: {why}; use {self.for_tokens}"
        if self.needs_log_probs and not context.stochastic:
            yield f"{context.rollout}.transition.kind: ode has no log-probabilities, which {self.label} needs; use cps or sde"

    @property
    def label(self) -> str:
        """What messages call it: its kind, or the name of its class."""
        return str(getattr(self, "kind", type(self).__name__))
