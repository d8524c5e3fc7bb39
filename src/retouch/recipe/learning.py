"""Sections of a recipe about learning: advantage, objective and optimizer."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, NonNegative, Positive, Section, Share


class GroupAdvantage(Section):
    """A sample against the other samples of its task."""

    kind: Literal["group"]
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is taken off a reward: the mean of its group, or of the others in it."""
    scale: Literal["group", "batch", "none"] = "group"
    """What it is then divided by: the deviation within the group, of the whole step, or nothing."""
    ddof: Literal[0, 1] = 0
    """Population (0) or sample (1) deviation."""
    eps: Positive = 1e-4
    """Added to the deviation."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; null leaves them."""


class BatchAdvantage(Section):
    """A sample against all samples of the step."""

    kind: Literal["batch"]
    ddof: Literal[0, 1] = 0
    """Population (0) or sample (1) deviation."""
    eps: Positive = 1e-4
    """Added to the deviation."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; null leaves them."""


class ValueHead(Section):
    """A small network that learns what reward to expect before each action, and is no part of what is exported."""

    learning_rate: Positive = 3e-3
    """Learning rate of the head, all through the run; the rest is the optimizer's."""
    clip: Positive | None = 0.2
    """How far a value counts as moved within a step, where the reward's range is 2 wide; null sets no bound."""
    width: Count = 128
    """Width of its hidden layer."""
    coefficient: NonNegative = 0.0
    """Weight of the value loss in the gradient of a writer's own weights; 0 lets the head learn alone."""


class GaeAdvantage(Section):
    """An action against what a value head expected before it: PPO. Rewards count from -1 to 1, the ends of their declared range."""

    kind: Literal["gae"]
    gamma: Share = 1.0
    """Discount for each action that is still to come."""
    lam: Share = 1.0
    """1 trusts rewards alone, less trusts values the more the further away the reward is."""
    whiten: bool = True
    """Take off the mean of all actions of the step and divide by their deviation."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; null leaves them."""
    head: ValueHead = ValueHead()
    """What says how much was to be expected."""


Advantage: TypeAlias = Annotated[GroupAdvantage | BatchAdvantage | GaeAdvantage, Field(discriminator="kind")]


class NoKl(Section):
    """No pull to the reference."""

    kind: Literal["none"]


class Kl(Section):
    """A pull to the reference: for transitions the closed form for two Gaussian steps or the squared distance of velocities, for
    tokens the estimate k3."""

    kind: Literal["closed", "velocity", "k3"]
    weight: Positive
    """Its weight in the loss."""


class TokenCycle(Section):
    """Text and picture train in turn: ``text_steps`` steps of the one, then ``vision_steps`` of the other, and again."""

    text_steps: Count = 10
    """Steps in which text alone trains."""
    vision_steps: Count = 10
    """Steps in which pictures alone train."""


class PolicyGradient(Section):
    """Policy gradient on the ratio of new to acting probability: GRPO and its kin."""

    kind: Literal["policy_gradient"]
    surrogate: Literal["clip", "cispo", "reinforce", "gspo"] = "clip"
    """PPO's clipped ratio, CISPO's clipped weight, none at all, or PPO's on the whole chain's ratio."""
    clip_low: Positive | None = None
    """The ratio counts down to 1 - clip_low; ``clip`` and ``gspo`` need it, ``cispo`` may leave the lower side open."""
    clip_high: Positive | None = None
    """The ratio counts up to 1 + clip_high; all but ``reinforce`` need it. 1e-6 to 1e-4 is usual with reduction ``mean``."""
    dual: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: the loss of a bad action is at most so many times its advantage; null sets no bound."""
    kl: Annotated[NoKl | Kl, Field(discriminator="kind")] = NoKl(kind="none")
    """Pull to the reference."""
    ratio_norm: bool = False
    """Centre and scale the log-ratios of transitions (GRPO-Guard)."""
    normalise: Literal["sequence", "token", "dr_grpo"] = "sequence"
    """How actions share the loss: equal within a sample, equal over all samples, or over the longest possible length."""
    tokens: Literal["all", "text", "vision"] | TokenCycle = Field(default="all", exclude_if=lambda tokens: tokens == "all")
    """Which tokens train where a policy writes text and then a picture; all are written, judged and compared in any case."""


class OldDecay(Section):
    """How the old policy follows the new one: it keeps the share min(rate * step, max) of itself after each step."""

    rate: NonNegative = 0.001
    """Growth of the share kept, per step."""
    max: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Largest share kept."""


class Nft(Section):
    """DiffusionNFT: learning on the forward process from pictures and rewards alone."""

    kind: Literal["nft"]
    beta: Positive = 1.0
    """How far the good and the bad velocity lie from the old one."""
    advantage_clip: Positive = 5.0
    """Advantage at which a picture counts as wholly good (or, negative, wholly bad)."""
    reference_weight: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""
    old_decay: OldDecay = OldDecay()
    """How the old policy follows."""
    samples: Count = 1
    """Noise levels drawn per picture."""
    sigma_sampling: Literal["logit_normal", "uniform"] = "uniform"
    """Where on the way from data to noise."""
    shift: Positive = 1.0
    """Above 1 goes closer to noise, where small pictures need their text."""


class Awm(Section):
    """Advantage-weighted matching: the supervised loss on the policy's own pictures, times their advantage."""

    kind: Literal["awm"]
    reference_weight: NonNegative = 0.0
    """Weight of the squared distance to the reference's velocity."""
    samples: Count = 1
    """Noise levels drawn per picture."""
    sigma_sampling: Literal["logit_normal", "uniform"] = "uniform"
    """Where on the way from data to noise."""
    shift: Positive = 1.0
    """Above 1 goes closer to noise, where small pictures need their text."""


class Dpo(Section):
    """Diffusion DPO: the best picture of each group is preferred to the worst."""

    kind: Literal["dpo"]
    beta: Positive = 2000.0
    """How sharply a pair is told apart; more stays closer to the reference."""
    samples: Count = 1
    """Noise levels drawn per pair."""
    sigma_sampling: Literal["logit_normal", "uniform"] = "uniform"
    """Where on the way from data to noise."""
    shift: Positive = 1.0
    """Above 1 goes closer to noise, where small pictures need their text."""


class Supervised(Section):
    """Flow matching on the tasks' own targets."""

    kind: Literal["supervised"]
    sigma_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """Where on the way from data to noise."""
    shift: Positive = 1.0
    """Above 1 goes closer to noise, where small pictures need their text."""


class Sft(Section):
    """Cross-entropy of the tokens of the tasks' own completions (``completion`` in their meta), for policies that write."""

    kind: Literal["sft"]
    normalise: Literal["sequence", "token"] = "token"
    """How tokens share the loss: equal within a completion, or equal over all completions."""


Objective: TypeAlias = Annotated[PolicyGradient | Nft | Awm | Dpo | Supervised | Sft, Field(discriminator="kind")]


class Optimizer(Section):
    """AdamW and its learning rate over time."""

    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """Decay of the running mean and of the running square of the gradient."""
    eps: Positive = 1e-8
    """Added to the root of the running square."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Positive | None = 1.0
    """Longer gradients are cut to this length; null leaves them."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warm-up; the last two end at 0."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
