"""How much better a sample is than what was to be expected: rewards (b,) to advantages (b,).

NaN is a missing reward: it takes no part in any mean or spread, and its advantage is exactly 0. A group is an integer id, never
a prompt; groups may differ in size and need not be contiguous. fp32 throughout.
"""

import math
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
    """Reward less its group's baseline, over (spread + eps), clamped to +-clip.

    ``baseline``: the mean of the group's valid rewards (GRPO, arXiv 2402.03300) or of the *other* valid ones (RLOO, arXiv
    2402.14740). ``scale``: divide by the group's standard deviation (GRPO), by that of all valid rewards around their common mean
    (Flow-GRPO's global std, arXiv 2505.05470), or by nothing (Dr. GRPO, arXiv 2503.20783). ``ddof`` 0 is the population's
    standard deviation (Flow-GRPO), 1 the sample's (TRL). A group with one valid reward, or with equal ones, gives exactly 0.

    ValueError: infinite rewards, ids that are not integers, or an option out of range.
    """
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline {baseline!r}: choose 'mean' or 'leave_one_out'")
    _check(rewards, ddof=ddof, eps=eps, clip=clip)
    index, groups = _index(rewards, group)
    rewards = rewards.float()
    valid = ~rewards.isnan()
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
    """Reward less the mean of all valid rewards, over (their standard deviation + eps), clamped to +-clip.

    For one sample a task; some systems call this PPO mode although there is no critic. Options and errors as ``group_relative``.
    """
    everything = torch.zeros(rewards.shape, dtype=torch.long, device=rewards.device)
    return group_relative(rewards, everything, ddof=ddof, eps=eps, clip=clip)


def on_scale(rewards: Float[Tensor, " b"], *, low: float, high: float) -> Float[Tensor, " b"]:
    """Rewards between ``low`` and ``high`` on a scale from -1 to 1, where a value head learns them. NaN stays.

    ValueError as ``check_scale``.
    """
    check_scale(low, high)
    return (2 * rewards.float() - (low + high)) / (high - low)


def check_scale(low: float, high: float) -> None:
    """ValueError where a range has no two finite ends."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"a value head needs a reward with a finite range, and this one goes from {low} to {high}; declare its true one"
        )


def zero_std_groups(rewards: Float[Tensor, " b"], group: Int[Tensor, " b"]) -> float:
    """The fraction, of the groups with at least two valid rewards, whose valid rewards are all equal: they teach nothing.

    NaN where no group has two valid rewards.
    """
    index, groups = _index(rewards, group)
    rewards = rewards.float()
    valid = ~rewards.isnan()
    low = _group_min(rewards, valid, index, groups)
    high = -_group_min(-rewards, valid, index, groups)
    comparable = _group_sum(valid.float(), index, groups) >= 2
    return float((low == high)[comparable].float().mean())


def _check(rewards: Tensor, *, ddof: int, eps: float, clip: float | None) -> None:
    if ddof not in (0, 1):
        raise ValueError(f"ddof {ddof}: choose 0 (population) or 1 (sample)")
    if not eps > 0:
        raise ValueError(f"eps {eps}: must be above 0, or a group of equal rewards divides by zero")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip {clip}: must be above 0, or None for no clamp")
    if rewards.isinf().any():
        raise ValueError("infinite rewards: a reward that could not be measured is NaN, and any other must be finite")


def _index(rewards: Tensor, group: Tensor) -> tuple[Tensor, int]:
    """Each row's place in the list of distinct groups, and how many there are."""
    if group.is_floating_point() or group.shape != rewards.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {tuple(rewards.shape)} and group {tuple(group.shape)} {group.dtype}: give one reward and one integer id a row"
        )
    ids, index = torch.unique(group, return_inverse=True)
    return index, len(ids)


def _group_sum(x: Tensor, index: Tensor, groups: int) -> Tensor:
    return x.new_zeros(groups).index_add(0, index, x)


def _group_min(rewards: Tensor, valid: Tensor, index: Tensor, groups: int) -> Tensor:
    infinity = float("inf")
    return rewards.new_full((groups,), infinity).scatter_reduce(0, index, rewards.masked_fill(~valid, infinity), "amin")


def _centre(
    rewards: Float[Tensor, " b"], valid: Bool[Tensor, " b"], index: Int[Tensor, " b"], groups: int
) -> tuple[Float[Tensor, " b"], Float[Tensor, " groups"]]:
    """Valid rewards less their group's mean (0 where missing), and how many are valid in each group."""
    # Relative to the group's minimum first: equal rewards become exact zeros, which the rounded mean of 7 x 0.1 would not give.
    above = (rewards - _group_min(rewards, valid, index, groups)[index]).masked_fill(~valid, 0)
    count = _group_sum(valid.float(), index, groups)
    mean = _group_sum(above, index, groups) / count.clamp(min=1)
    return (above - mean[index]).masked_fill(~valid, 0), count


def _std(centred: Tensor, count: Tensor, index: Tensor, ddof: int) -> Float[Tensor, " groups"]:
    return (_group_sum(centred.square(), index, len(count)) / (count - ddof).clamp(min=1)).sqrt()
