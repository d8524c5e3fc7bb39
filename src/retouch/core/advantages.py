"""Advantages relative to the group or the batch, and weights of the best samples: rewards (b,), fp64 or fp32, to advantages (b,),
fp32.

A NaN reward is a missing reward: it is left out of every mean and standard deviation, and its advantage is exactly 0. A group is
identified by an integer id, never by its prompt. Groups may differ in size and need not be contiguous.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def group_relative(
    rewards: Float[Tensor, " b"],
    group: Int[Tensor, " b"],
    *,
    baseline: Literal["mean", "leave_one_out"] = "mean",
    scale: Literal["group", "batch", "none"] = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    clip: float | None = 5.0,
) -> Float[Tensor, " b"]:
    """(reward - baseline) / (std + eps), clamped to [-clip, clip].

    ``rewards``: (b,), in any unit, NaN if missing. ``group``: (b,), the integer id of each row's group.
    ``baseline``: "mean" is the mean of the group's valid rewards (GRPO, DeepSeekMath, arXiv 2402.03300); "leave_one_out" is the
    mean of the *other* valid rewards of the group (RLOO, arXiv 2402.14740).
    ``scale``: "group" divides by the group's standard deviation (GRPO); "batch" by the standard deviation of all valid rewards
    around their common mean (``global_std`` of Flow-GRPO, arXiv 2505.05470); "none" does not divide (Dr. GRPO, arXiv 2503.20783).
    ``ddof``: 0 for the population standard deviation (Flow-GRPO), 1 for the sample standard deviation (TRL).
    ``clip``: the largest absolute advantage; None for no clamp.
    Returns (b,), exactly 0 for a missing reward and for a group with fewer than two valid rewards or with equal rewards.

    Raises ValueError if a reward is infinite, a group id is not an integer, or an option is out of range.

    Example::

        >>> retouch.core.group_relative(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1]), scale="none")
        tensor([ 1., -1.,  0.,  0.])
    """
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline {baseline!r}: choose 'mean' or 'leave_one_out'")
    if ddof not in (0, 1):
        raise ValueError(f"ddof {ddof}: choose 0 (population) or 1 (sample)")
    if not eps > 0:
        raise ValueError(f"eps {eps}: must be above 0, otherwise a group of equal rewards is divided by zero")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip {clip}: must be above 0, or None for no clamp")
    rewards, valid, index, groups = _grouped(rewards, group)
    centred, count = _centre(rewards, valid, index, groups)
    advantages = centred
    if baseline == "leave_one_out":
        advantages = centred * (count / (count - 1).clamp(min=1))[index]
    if scale == "group":
        advantages = advantages / (_std(centred, count, index, ddof)[index] + eps)
    elif scale == "batch":
        everything = torch.zeros_like(index)
        around_mean, total = _centre(rewards, valid, everything, 1)
        advantages = advantages / (_std(around_mean, total, everything, ddof) + eps)
    elif scale != "none":
        raise ValueError(f"scale {scale!r}: choose 'group', 'batch' or 'none'")
    return advantages if clip is None else advantages.clamp(-clip, clip)


def batch_relative(
    rewards: Float[Tensor, " b"], *, ddof: int = 0, eps: float = 1e-4, clip: float | None = 5.0
) -> Float[Tensor, " b"]:
    """(reward - mean) / (std + eps) over all valid rewards of the batch, clamped to [-clip, clip].

    For one sample per task: Flow-GRPO (arXiv 2505.05470) without ``per_prompt_stat_tracking``. Some systems call this PPO mode,
    although it has no critic. Shapes, options and errors are those of ``group_relative``.

    Example::

        >>> retouch.core.batch_relative(torch.tensor([3.0, 1.0]))
        tensor([ 0.9999, -0.9999])
    """
    everything = torch.zeros(rewards.shape, dtype=torch.long, device=rewards.device)
    return group_relative(rewards, everything, ddof=ddof, eps=eps, clip=clip)


def turn_returns(
    rewards: Float[Tensor, "b n"], whole: Float[Tensor, " b"], turns: Int[Tensor, " b"], *, discount: float, end: float
) -> Float[Tensor, "b n"]:
    """The return of each turn: G_k = r_k + discount * G_(k+1), and G = r + end * whole for the last turn of a row.

    ``rewards``: of each turn. ``whole``: that of the whole episode. ``turns``: the number of turns of each row, 1 to n. NaN for a
    turn that a row does not have, and if a reward in the return is missing (NaN) and has a weight above 0.

    Example::

        >>> retouch.core.turn_returns(torch.tensor([[1.0, 2.0]]), torch.tensor([4.0]), torch.tensor([2]), discount=0.5, end=1.0)
        tensor([[4., 6.]])
    """
    returns = torch.full_like(rewards, math.nan)
    after = end * whole if end else torch.zeros_like(whole)
    for turn in reversed(range(rewards.shape[1])):
        there = turn < turns
        returns[there, turn] = rewards[there, turn] + after[there]
        after = torch.where(there, discount * returns[:, turn] if discount else torch.zeros_like(after), after)
    return returns


def decoupled(
    scores: Sequence[Float[Tensor, " b"]],
    weights: Sequence[float],
    group: Int[Tensor, " b"],
    *,
    eps: float = 1e-4,
    clip: float | None = 5.0,
) -> Float[Tensor, " b"]:
    """Normalise each column of scores over its group, sum the columns with their weights, and normalise the sums over the batch.

    ``scores``: columns (b,), NaN if missing. ``weights``: one for each column, of any sign. ``group``, ``eps`` and ``clip`` as in
    ``group_relative``; the standard deviations are those of a sample (ddof 1). A row with a missing score is in no mean, and its
    advantage is exactly 0. Unlike ``group_relative`` of the weighted sum, columns with different spreads count equally, and scores
    that cancel in the sum still give advantages.

    Source: GDPO (arXiv 2601.05242). Raises ValueError like ``group_relative``.

    Example::

        >>> scores = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 10.0, 0.0])]
        >>> retouch.core.decoupled(scores, [1.0, 1.0], torch.tensor([0, 0, 0]))
        tensor([ 0.5772,  0.5774, -1.1546])
    """
    missing = torch.stack(list(scores)).isnan().any(dim=0)
    columns = [group_relative(column.masked_fill(missing, math.nan), group, ddof=1, eps=eps, clip=None) for column in scores]
    total = torch.stack([weight * column for weight, column in zip(weights, columns, strict=True)]).sum(dim=0)
    return batch_relative(total.masked_fill(missing, math.nan), ddof=1, eps=eps, clip=clip)


def best_of_group(rewards: Float[Tensor, " b"], group: Int[Tensor, " b"], *, keep: int = 1) -> Float[Tensor, " b"]:
    """Equal positive weights for the ``keep`` best samples of each group, and 0 for the others: best-of-n selection.

    ``rewards`` and ``group`` as in ``group_relative``. Samples that tie for the last place share it equally. The weights have mean
    1 over the valid rewards of a group. A group from which no sample would be dropped has weight 0: a group with equal rewards, or
    with at most ``keep`` valid rewards.

    Source: RAFT (Dong et al. 2023, arXiv 2304.06767). Raises ValueError if a reward is infinite, a group id is not an integer, or
    ``keep`` is below 1.

    Example::

        >>> retouch.core.best_of_group(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1]))
        tensor([2., 0., 0., 0.])
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: keep at least 1 sample of a group")
    rewards, valid, index, groups = _grouped(rewards, group)
    together = (index[:, None] == index) & valid
    better = (together & (rewards > rewards[:, None])).sum(dim=1)
    tied = (together & (rewards == rewards[:, None])).sum(dim=1)
    share = ((keep - better) / tied.clamp(min=1)).clamp(0, 1)
    count = _group_sum(valid.float(), index, groups)[index]
    chosen = valid & (count > keep) & _unequal(rewards, valid, index, groups)[index]
    return (share * count / keep).masked_fill(~chosen, 0)


def exponential_weights(
    rewards: Float[Tensor, " b"], group: Int[Tensor, " b"], *, temperature: float = 1.0, eps: float = 1e-4
) -> Float[Tensor, " b"]:
    """exp(A / temperature), divided by its mean over the group, with A = (reward - mean) / (std + eps) of the group.

    ``rewards`` and ``group`` as in ``group_relative``; give all rows the same id to compare all samples of a batch. The weights
    have mean 1 over the valid rewards of a group. With a low ``temperature`` only the best sample has weight, with a high one all
    samples have equal weights. A group with equal rewards, or with fewer than two valid rewards, has weight 0.

    Source: reward-weighted regression (Peters & Schaal 2007); with diffusion models in Black et al. 2023 (arXiv 2305.13301). Raises
    ValueError if a reward is infinite, a group id is not an integer, or ``temperature`` or ``eps`` is not above 0.

    Example::

        >>> retouch.core.exponential_weights(torch.tensor([3.0, 1.0]), torch.tensor([0, 0]), temperature=2.0)
        tensor([1.4621, 0.5379])
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: must be above 0")
    scaled = group_relative(rewards, group, eps=eps, clip=None) / temperature
    rewards, valid, index, groups = _grouped(rewards, group)
    largest = -_group_min(-scaled, valid, index, groups)  # subtracted, so that nothing overflows
    weights = (scaled - largest[index]).exp().masked_fill(~valid, 0)
    mean = _group_sum(weights, index, groups) / _group_sum(valid.float(), index, groups)
    return (weights / mean[index]).masked_fill(~_unequal(rewards, valid, index, groups)[index] | ~valid, 0)


def rescale_rewards(rewards: Float[Tensor, " b"], *, low: float, high: float) -> Float[Tensor, " b"]:
    """Map rewards (b,) linearly from [low, high] to [-1, 1], the range in which a value head learns. NaN stays NaN.

    Raises ValueError in the same cases as ``check_reward_range``.

    Example::

        >>> retouch.core.rescale_rewards(torch.tensor([0.0, 5.0, 10.0]), low=0, high=10)
        tensor([-1.,  0.,  1.])
    """
    check_reward_range(low, high)
    wide = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    return ((2 * wide - (low + high)) / (high - low)).float()


def check_reward_range(low: float, high: float) -> None:
    """Raise ValueError unless ``low`` and ``high`` are finite and ``low`` < ``high``.

    Example::

        >>> retouch.core.check_reward_range(0.0, 1.0)
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"a value head needs a reward with a finite range, but this one ranges from {low} to {high}; declare its true range"
        )


def zero_std_groups(rewards: Float[Tensor, " b"], group: Int[Tensor, " b"]) -> float:
    """The fraction, 0 to 1, of groups whose valid rewards are all equal, so that their advantages are 0.

    Counts only groups with at least two valid rewards; NaN if there is none. ``rewards`` and ``group`` as in ``group_relative``.

    Such groups give no gradient; DAPO (arXiv 2503.14476) does not train on them.

    Example::

        >>> retouch.core.zero_std_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
        0.5
    """
    equal, comparable = _equal(rewards, group)
    return float(equal[comparable].float().mean())


def equal_groups(rewards: Float[Tensor, " b"], group: Int[Tensor, " b"]) -> Int[Tensor, " n"]:
    """The ids, ascending, of the groups with at least two valid rewards, all of them equal.

    ``rewards`` and ``group`` as in ``group_relative``. Missing rewards are ignored.

    Source: DAPO (arXiv 2503.14476), whose dynamic sampling replaces such groups.

    Example::

        >>> retouch.core.equal_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
        tensor([0])
    """
    equal, comparable = _equal(rewards, group)
    ids: Tensor = torch.unique(group)
    return ids[comparable & equal]


def _grouped(rewards: Tensor, group: Tensor) -> tuple[Float[Tensor, " b"], Bool[Tensor, " b"], Int[Tensor, " b"], int]:
    """The rewards in at least fp32, which of them are valid, the index of each row's group among the distinct groups, and the
    number of groups."""
    if group.is_floating_point() or group.shape != rewards.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group {tuple(group.shape)} {group.dtype}: give one reward and one integer id per row"
        )
    if rewards.isinf().any():
        raise ValueError("infinite rewards: every reward must be finite, or NaN where it could not be measured")
    ids, index = torch.unique(group, return_inverse=True)
    wide = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    return wide, ~wide.isnan(), index, len(ids)


def _group_sum(x: Tensor, index: Tensor, groups: int) -> Tensor:
    return x.new_zeros(groups).index_add(0, index, x)


def _group_min(rewards: Tensor, valid: Tensor, index: Tensor, groups: int) -> Tensor:
    infinity = float("inf")
    return rewards.new_full((groups,), infinity).scatter_reduce(0, index, rewards.masked_fill(~valid, infinity), "amin")


def _unequal(rewards: Tensor, valid: Tensor, index: Tensor, groups: int) -> Bool[Tensor, " groups"]:
    """Whether a group has two valid rewards that differ."""
    return _group_min(rewards, valid, index, groups) < -_group_min(-rewards, valid, index, groups)


def _equal(rewards: Tensor, group: Tensor) -> tuple[Bool[Tensor, " groups"], Bool[Tensor, " groups"]]:
    """For each group, in the order of ids: whether all its valid rewards are equal, and whether it has at least two of them."""
    rewards, valid, index, groups = _grouped(rewards, group)
    return ~_unequal(rewards, valid, index, groups), _group_sum(valid.float(), index, groups) >= 2


def _centre(
    rewards: Float[Tensor, " b"], valid: Bool[Tensor, " b"], index: Int[Tensor, " b"], groups: int
) -> tuple[Float[Tensor, " b"], Float[Tensor, " groups"]]:
    """Valid rewards minus their group's mean (0 where missing), and the number of valid rewards in each group."""
    # Subtract the group's minimum first, so that equal rewards give exact zeros: the rounded mean of 7 x 0.1 is not 0.1. Only then
    # round to fp32, in which 1e6 + 0.01 equals 1e6.
    above = (rewards - _group_min(rewards, valid, index, groups)[index]).masked_fill(~valid, 0).float()
    count = _group_sum(valid.float(), index, groups)
    mean = _group_sum(above, index, groups) / count.clamp(min=1)
    return (above - mean[index]).masked_fill(~valid, 0), count


def _std(centred: Tensor, count: Tensor, index: Tensor, ddof: int) -> Float[Tensor, " groups"]:
    return (_group_sum(centred.square(), index, len(count)) / (count - ddof).clamp(min=1)).sqrt()
