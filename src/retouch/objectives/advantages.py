"""Advantages: sections of the recipe that turn the rewards of all ranks into an advantage for each action of this rank's rows.

Rewards are (rows,), float64, in the step's global order, NaN if a sample could not be scored; such a row has advantage 0 or NaN and
weight 0 in the loss. ``group`` (rows,) is the number of each row's group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.config.section import Count, Positive, Section, Share
from retouch.objectives.base import Objective, ValueHead

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from retouch.protocols import Collectives
    from retouch.types import Column, Scores, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Credit:
    """``advantages`` (b, t) of this rank's rows; ``returns`` (b, t), the targets of a value head; ``metrics`` over all ranks."""

    advantages: Float[Tensor, "b t"]
    returns: Float[Tensor, "b t"] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class Advantage(Section):
    """Base class of all advantages, built in or your own. Override ``__call__``.

    ``__call__`` runs on the gathered rewards of all ranks and must be deterministic, so that every rank computes the same.
    """

    weighs: ClassVar[bool] = False
    """Whether the advantages are factors of the loss weights, at least 0. Rows with 0 are left out of the update, which saves their
    forward and backward passes."""
    value_head: ClassVar[ValueHead | None] = None
    """The ``ValueHead`` that trains together with the policy; None if this advantage needs none."""
    reads_scores: ClassVar[bool] = False
    """Whether ``__call__`` has a keyword ``scores``: each column of the reward of all ranks, (rows,), by its full name."""
    smallest_group: ClassVar[int] = 1
    """The smallest group size with which advantages can differ from 0."""

    def __call__(
        self, rewards: Float[Tensor, " rows"], group: Int[Tensor, " rows"], *, reward_range: tuple[float, float]
    ) -> Float[Tensor, " rows"]:
        """Return one advantage per sample, from the rewards of all ranks. ``reward_range``: the smallest and the largest reward."""
        raise NotImplementedError(f"{type(self).__name__} computes no advantages")

    def assign(self, advantages: Float[Tensor, " b"], trajectory: Trajectory, ranks: Collectives) -> Credit:
        """Assign an advantage to each action of this rank's rows; by default, every action gets the advantage of its row."""
        return Credit(advantages[:, None].expand(trajectory.mask.shape))

    @property
    def label(self) -> str:
        """The name of the advantage in messages: its kind, or the name of its class."""
        return str(getattr(self, "kind", type(self).__name__))

    def check_range(self, low: float, high: float) -> None:
        """Raise ValueError if rewards of this range cannot be used."""

    def check_columns(self, columns: Mapping[str, Column], combined: Sequence[str]) -> None:
        """Raise ValueError if this reward cannot be used. Called if ``reads_scores``. ``columns``: all of its columns.
        ``combined``: those that ``combine`` uses, all of which have a score if a sample has a reward."""

    def problems(self, objective: Objective, *, objective_key: str, is_autoregressive: bool) -> Iterator[str]:
        """Yield a line for each setting of the recipe that this advantage does not support, as "key: mistake; what to do"."""
        if self.weighs and objective.needs_both_signs and not objective.imitates:
            why = f"{objective.label} also learns from bad samples, and advantage {self.label} marks none as bad"
            yield f"{objective_key}.kind: {why}; use awm, or advantage.kind group"
        if self.weighs and not objective.uses_advantages:
            why = f"it would weight the samples of {objective.label}, which learns without advantages"
            yield f"advantage.kind: {self.label}: {why}; use group"


class GroupAdvantage(Advantage):
    """The reward of a sample, relative to the other samples of its task (GRPO, arXiv 2402.03300; RLOO, arXiv 2402.14740).

    Example::

        >>> retouch.GroupAdvantage(baseline="leave_one_out", scale="none").scale
        'none'
    """

    kind: Literal["group"] = "group"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward: the mean of its group, or the mean of the other samples in the group."""
    scale: Literal["group", "batch", "none"] = "group"
    """What the difference is divided by: the standard deviation of the group or of the whole step, or nothing."""
    ddof: Literal[0, 1] = 0
    """Population (0) or sample (1) standard deviation."""
    eps: Positive = 1e-4
    """Added to the standard deviation."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; null does not clip."""

    smallest_group: ClassVar[int] = 2

    def __call__(self, rewards: Tensor, group: Tensor, *, reward_range: tuple[float, float]) -> Tensor:
        from retouch.core.advantages import group_relative

        return group_relative(
            rewards, group, baseline=self.baseline, scale=self.scale, ddof=self.ddof, eps=self.eps, clip=self.clip
        )


class BatchAdvantage(Advantage):
    """The reward of a sample, relative to all samples of the step.

    Source: REINFORCE++ (arXiv 2501.03262), which normalises advantages over the batch.

    Example::

        >>> retouch.BatchAdvantage(clip=None).kind
        'batch'
    """

    kind: Literal["batch"] = "batch"
    ddof: Literal[0, 1] = 0
    """Population (0) or sample (1) standard deviation."""
    eps: Positive = 1e-4
    """Added to the standard deviation."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; null does not clip."""

    def __call__(self, rewards: Tensor, group: Tensor, *, reward_range: tuple[float, float]) -> Tensor:
        from retouch.core.advantages import batch_relative

        return batch_relative(rewards, ddof=self.ddof, eps=self.eps, clip=self.clip)


class GDPOAdvantage(Advantage):
    """Each column of the reward is normalised within its group by itself; their weighted sum is normalised over the step (GDPO,
    arXiv 2601.05242).

    With ``group``, the column with the largest spread decides, and samples whose scores have the same sum have the same advantage.
    Both normalisations are (value - mean) / (std + eps), with the sample standard deviation. A sample without a score in one of the
    columns is in no mean and has advantage 0.

    Example::

        >>> retouch.GDPOAdvantage(weights={"alignment": 0.6, "quality": 0.4}).label
        'gdpo'
    """

    kind: Literal["gdpo"] = "gdpo"
    weights: Mapping[str, float]
    """The weight of each column that ``reward.combine`` uses, by its full name; below 0 for a column of which lower is better."""
    eps: Positive = 1e-4
    """Added to the standard deviations."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; null does not clip."""

    reads_scores: ClassVar[bool] = True
    smallest_group: ClassVar[int] = 2

    def __call__(
        self, rewards: Tensor, group: Tensor, *, reward_range: tuple[float, float], scores: Scores | None = None
    ) -> Tensor:
        from retouch.core.advantages import decoupled

        assert scores is not None, "the run gives scores to an advantage that reads them"
        columns = [scores[name] for name in self.weights]
        return decoupled(columns, list(self.weights.values()), group, eps=self.eps, clip=self.clip)

    def check_columns(self, columns: Mapping[str, Column], combined: Sequence[str]) -> None:
        if set(self.weights) != set(combined):
            given, needed = (", ".join(map(repr, names)) or "none" for names in (self.weights, combined))
            raise ValueError(f"advantage.weights: has {given}, and reward.combine uses {needed}; give each of these a weight")
        for name, weight in self.weights.items():
            if weight > 0 and not columns[name].higher_is_better:
                raise ValueError(f"advantage.weights: lower is better for {name!r}; give it a weight below 0")
        if not any(self.weights.values()):
            raise ValueError("advantage.weights: all weights are 0, so nothing would be learned; give one column another weight")


class BestAdvantage(Advantage):
    """Only the best samples of each group train, with equal weights: RAFT, also called best-of-n or rejection-sampling
    fine-tuning (Dong et al. 2023, arXiv 2304.06767).

    Use it with objective ``awm`` (flow matching on the kept images) or, for tokens, with surrogate ``reinforce`` (cross-entropy of
    the kept completions). Samples that tie for the last place share its weight. The weights of a group have mean 1. A group from
    which no sample would be dropped has weight 0: a group with equal rewards, or with at most ``keep`` scored samples.

    Example::

        >>> retouch.BestAdvantage(keep=2).keep
        2
    """

    kind: Literal["best"] = "best"
    keep: Count = 1
    """Number of samples of each group that train."""

    weighs: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group: Tensor, *, reward_range: tuple[float, float]) -> Tensor:
        from retouch.core.advantages import best_of_group

        return best_of_group(rewards, group, keep=self.keep)

    @property
    def smallest_group(self) -> int:  # type: ignore[override]
        return self.keep + 1


class ExponentialAdvantage(Advantage):
    """Every sample trains with the weight exp(A / temperature): reward-weighted regression (Peters & Schaal 2007; for diffusion
    models Lee et al. 2023, arXiv 2302.12192, and Black et al. 2023, arXiv 2305.13301).

    A = (reward - mean) / (std + eps), over the group or the step; the weights are divided by their mean over the same samples. Use
    it with objective ``awm`` or, for tokens, with surrogate ``reinforce``. A group (or step) with equal rewards, or with fewer than
    two scored samples, has weight 0.

    Example::

        >>> retouch.ExponentialAdvantage(temperature=0.5).over
        'group'
    """

    kind: Literal["exponential"] = "exponential"
    temperature: Positive = 1.0
    """In standard deviations of the reward. A low value trains only on the best samples, a high value on all samples equally."""
    over: Literal["group", "step"] = "group"
    """The samples that are compared, and over which the weights have mean 1: the samples of a task, or all samples of the step."""
    eps: Positive = 1e-4
    """Added to the standard deviation."""

    weighs: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group: Tensor, *, reward_range: tuple[float, float]) -> Tensor:
        from retouch.core.advantages import exponential_weights

        compared = group if self.over == "group" else group * 0
        return exponential_weights(rewards, compared, temperature=self.temperature, eps=self.eps)

    @property
    def smallest_group(self) -> int:  # type: ignore[override]
        return 2 if self.over == "group" else 1


class GAEAdvantage(Advantage):
    """The reward, relative to the prediction of a value head before each action: PPO with generalized advantage estimation (arXiv
    1506.02438). Rewards are mapped linearly from their declared range to the range from -1 to 1.

    Example::

        >>> retouch.GAEAdvantage(lam=0.95).gamma
        1.0
    """

    kind: Literal["gae"] = "gae"
    gamma: Share = 1.0
    """Discount per action."""
    lam: Share = 1.0
    """GAE's lambda: with 1, returns are computed from rewards only; smaller values also use the predicted values, the more the
    farther an action is from the reward."""
    whiten: bool = True
    """Subtract the mean over all actions of the step and divide by their standard deviation."""
    clip: Positive | None = 5.0
    """Largest absolute advantage; null does not clip."""
    head: ValueHead = ValueHead()
    """The value head."""

    def __call__(self, rewards: Tensor, group: Tensor, *, reward_range: tuple[float, float]) -> Tensor:
        from retouch.core.advantages import rescale_rewards

        low, high = reward_range
        return rescale_rewards(rewards, low=low, high=high)

    def assign(self, advantages: Float[Tensor, " b"], trajectory: Trajectory, ranks: Collectives) -> Credit:
        """Compute the advantages and returns of each action. ``advantages``: each row's reward, scaled to -1 to 1, NaN if missing.

        Whitening uses the actions of all ranks. The metric ``value/explained_variance`` is computed for the discounted rewards, not
        for the returns, which contain predicted values if ``lam`` is below 1.
        """
        import torch

        from retouch.core.gae import discounted_returns, explained_variance, gae, whiten

        assert trajectory.values is not None, "the policy has a value head"
        rewards, values, mask = advantages, trajectory.values.cpu(), trajectory.mask.cpu()
        estimated = gae(rewards, values, mask, gamma=self.gamma, lam=self.lam)
        returns = estimated + values
        counted = mask & ~rewards.isnan()[:, None]
        discounted_rewards = discounted_returns(rewards.nan_to_num(0.0), mask, gamma=self.gamma)
        columns = torch.stack([estimated, values, discounted_rewards, counted.float()], dim=1)
        every, predicted, observed, counts = ranks.gather(columns).unbind(dim=1)
        metrics = {"value/explained_variance": explained_variance(observed, predicted, counts > 0)}
        if self.whiten:
            first = ranks.rank * len(rewards)
            estimated = whiten(every, counts > 0)[first : first + len(rewards)]
        if self.clip is not None:
            estimated = estimated.clamp(-self.clip, self.clip)
        return Credit(estimated, returns, metrics)

    @property
    def value_head(self) -> ValueHead:  # type: ignore[override]
        return self.head

    def check_range(self, low: float, high: float) -> None:
        from retouch.core.advantages import check_reward_range

        check_reward_range(low, high)

    def problems(self, objective: Objective, *, objective_key: str, is_autoregressive: bool) -> Iterator[str]:
        if objective.imitates:
            return
        if not objective.has_value_loss:
            why = f"{objective.label} uses one advantage per sample and trains no value head"
            yield f"{objective_key}.kind: {why}; use advantage.kind group or batch"
        elif objective.one_ratio_per_row:
            why = "gspo has one ratio for all actions of a sample, but gae gives each action its own advantage"
            yield f"{objective_key}.surrogate: {why}; use clip"
        if self.head.coefficient > 0 and not is_autoregressive:
            yield "advantage.head.coefficient: the value head of a denoising policy does not read the policy's states; remove it"
