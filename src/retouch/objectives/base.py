"""The base class of objectives: a section of the recipe that turns a minibatch into losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.config.section import Count, NonNegative, Positive, Section

if TYPE_CHECKING:
    import torch

    from retouch.types import Batch, Loss, Minibatch, Scores, Trajectory


class ValueHead(Section):
    """A small network that predicts the reward before each action. It is not exported."""

    learning_rate: Positive = 3e-3
    """Learning rate of the value head, constant over the run; the policy uses the learning rate of the optimizer."""
    clip: Positive | None = 0.2
    """PPO's value clip: the largest change of a value within a step, for rewards scaled to -1 to 1; null does not clip."""
    width: Count = 128
    """Width of the hidden layer."""
    coefficient: NonNegative = 0.0
    """Factor of the value loss in the gradient of a language model's weights; with 0 the value loss trains only the value head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveContext:
    """The settings of the rest of the recipe that an objective may read in its checks. Keys are paths in the recipe, for messages.

    ``objective``, ``rollout``: the keys of the two sections. ``model``: the kind of the policy's model. ``is_autoregressive``: the
    actions are tokens; otherwise they are transitions of a denoising chain. ``token_kinds``: the kinds of tokens that the model
    writes ("text", "vision"), None if unknown. ``stochastic``: the actions have log-probabilities (always True for tokens).
    ``noise_level``: the noise level of the transitions, None if they have none. ``reduction``: how a transition's log-probability
    is reduced over a latent's elements, or "token". ``actions``: the number of actions of a row, None if unknown. ``microbatch``:
    the value of the recipe's key. ``optimizer_steps``: the number per rollout. ``lora_dropout``: (key, value), None without a LoRA.
    ``num_steps``: the number of steps of a denoising chain. ``engine``: an engine samples in place of the policy's own model.
    ``offload``: the autoencoder is in CPU memory while it is not used. ``sharded``: all ranks must call the model equally often.
    """

    objective: str
    rollout: str
    model: str
    is_autoregressive: bool
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
    sharded: bool = False


class Objective(Section):
    """Base class of all objectives, built in or your own. Override ``losses``; everything else has a default.

    The fields of a subclass are the keys of its section. An objective sees the policy through ``retouch.protocols.Policy`` (or
    ``VelocityPolicy``) and the rows through ``Minibatch``; it does not know the model, the reward or the number of ranks.
    """

    imitates: ClassVar[bool] = False
    """Whether the objective learns from the images or completions of the tasks, without rollouts, rewards and advantages."""
    needs_pairs: ClassVar[bool] = False
    """Whether every task must have a chosen and a rejected image, which are the two rows of its group."""
    acts_with: ClassVar[Literal["current", "old"]] = "current"
    """The weights that sample the rollout."""
    needs_velocities: ClassVar[bool] = False
    """Whether the objective calls ``VelocityPolicy.velocity``, which only denoising policies have."""
    needs_log_probs: ClassVar[bool] = False
    """Whether the objective calls ``Policy.evaluate``, for which the actions of the rollout must have log-probabilities."""
    compares_groups: ClassVar[bool] = False
    """Whether the objective compares the rows of a group within a minibatch, so minibatches and ranks must not split groups."""
    needs_both_signs: ClassVar[bool] = False
    """Whether the objective also learns from bad samples, which have negative advantages or the lowest advantage of their group."""

    can_pair_noise: ClassVar[bool] = False
    """Whether ``needs_initial_noise`` may be True, which depends on the objective's keys."""
    rewards: ClassVar[Mapping[str, Section]] = {}
    """The sections of the rewards that the objective differentiates, by their keys."""
    taught_by: ClassVar[Mapping[str, Any]] = {}
    """The teachers (``retouch.Teacher``) that the objective learns from, by their keys in its section."""
    uses_advantages: ClassVar[bool] = True
    """Whether the loss depends on advantages. Without them, a group may have one row."""
    learns_from_teachers: ClassVar[bool] = False
    """Whether the objective calls ``TaughtPolicy.teach``, for which chains keep the states of all steps that train."""

    has_value_loss: ClassVar[bool] = False
    """Whether ``build`` adds a value loss if a value head trains (advantage ``gae``)."""
    for_tokens: ClassVar[str] = "policy_gradient"
    """The kind that error messages recommend if this objective is used with a policy that writes tokens."""

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        """Yield this rank's shares of the loss, one per microbatch; backward runs on each share before the next one is computed.

        ``minibatch.advantages`` and ``minibatch.weights`` are (b, t); the weights are normalised over the rows of all ranks (to the
        sum 1 unless ``loss_weights`` is "dr_grpo" or the advantage weighs rows), so a loss is ``(weights *
        loss_per_action).sum()``, and a metric that is a mean over actions is ``(weights * metric).sum() / minibatch.weight_sum``.
        Every rank must yield equally many shares.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no losses")

    def demonstrate(self, policy: Any, batch: Batch) -> Trajectory:
        """Return the trajectory that an objective with ``imitates`` learns from; by default the encoded targets of the tasks."""
        trajectory: Trajectory = policy.demonstrate(batch)
        return trajectory

    @property
    def heldout_columns(self) -> Mapping[str, Literal["share", "mean"]]:
        """The columns that ``measure`` adds to an evaluation. ``share``: the values are 1 (yes), 0 (no) and 0.5 (undecided), and
        the confidence interval is that of a proportion (Wilson). ``mean``: any numbers."""
        return {}

    def measure(self, policy: Any, batch: Batch) -> Scores:
        """Measure held-out tasks without sampled images and rewards: one number per task and column of ``heldout_columns``.

        The batch has two rows per task, slots 0 and 1.
        """
        raise NotImplementedError(f"{type(self).__name__} measures no {', '.join(self.heldout_columns)}")

    def for_trial(self) -> Objective:
        """The objective of the preflight, whose loss must have a gradient for any samples. Only without ``uses_advantages``."""
        return self

    def after_step(self, policy: Any, step: int) -> None:
        """Called after optimizer step ``step`` (from 1) of the phase."""

    def load(self, device: torch.device | str) -> None:
        """Load what the loss needs besides the policy. Called before the policy is loaded. ``device``: the device for rewards.

        Raises ValueError if weights or packages are missing.
        """

    def first_gradient_step(self, num_steps: int, *, seed: int, step: int) -> int:
        """The first step of a denoising chain of ``num_steps`` that the loss computes with gradient, in training step ``step``. The
        rollout keeps the state before it. It must be the same on all ranks. 0 with ``needs_initial_noise``."""
        if self.needs_initial_noise:
            return 0
        raise NotImplementedError(f"{type(self).__name__} continues no chain")

    def build(self, *, entropy: bool = False, value_head: ValueHead | None = None) -> Objective:
        """Return the objective of a run. ``entropy``: also measure the entropy of tokens. ``value_head``: the section of the value
        head that trains together with the policy; None without one."""
        return self

    @property
    def needs_targets(self) -> bool:
        """Whether every task must have what the objective imitates."""
        return self.imitates

    @property
    def weight_copies(self) -> frozenset[str]:
        """The copies of the weights to keep: "reference" (from the start of the phase), "old" (follows the current weights)."""
        return frozenset()

    @property
    def needs_acting_means(self) -> bool:
        """Whether the rollout must store the mean of each transition."""
        return False

    @property
    def needs_initial_noise(self) -> bool:
        """Whether the rollout must keep the noise that each deterministic chain starts from, for ``InitialNoisePolicy``."""
        return False

    @property
    def kl_kind(self) -> Literal["k3", "closed", "velocity"] | None:
        """The kind of KL to the reference in the loss; None without a KL."""
        return None

    @property
    def has_ratio(self) -> bool:
        """Whether the loss depends on the ratio of current to acting probability, which must be 1 before the first update."""
        return False

    @property
    def clip_bounds(self) -> tuple[float, ...]:
        """The bounds of |ratio - 1|. The trial step in 16 bits allows a small share of the least one before the first update."""
        return ()

    @property
    def one_ratio_per_row(self) -> bool:
        """Whether all actions of a row share one ratio, so that they cannot have different advantages."""
        return False

    @property
    def loss_weights(self) -> Literal["sequence", "token", "dr_grpo"]:
        """How the loss is normalised over actions (see ``core/surrogates.py``)."""
        return "sequence"

    def trained_kinds(self, step: int) -> Sequence[int] | None:
        """The kinds of actions (``retouch.types.Kind``) that train in step ``step`` of the phase, from 0; None means all."""
        return None

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        """Yield a line for each setting of the recipe that this objective does not support, as "key: mistake; what to do"."""
        if self.needs_velocities and context.is_autoregressive:
            why = f"{self.label} trains velocities, and a policy that writes tokens has none"
            yield f"{context.objective}.kind: {why}; use {self.for_tokens}"
        if self.needs_log_probs and not context.stochastic:
            yield f"{context.rollout}.transition.kind: ode has no log-probabilities, which {self.label} needs; use cps or sde"

    @property
    def label(self) -> str:
        """The name of the objective in messages: its kind, or the name of its class."""
        return str(getattr(self, "kind", type(self).__name__))
