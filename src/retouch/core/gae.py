"""Generalized advantage estimation, and the loss and metrics of the value head it needs. fp32.

The reward of a row (b,) is given at its last action. ``values`` (b, t) are the value head's predictions before each action, from
the weights that sampled the rollout. Where ``mask`` (b, t) is False, the policy had no choice (a forced token, or padding after the
end): such an action is not counted as a time step, and its advantage is 0. A NaN reward is a missing reward: all advantages of its
row are exactly 0.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def gae(
    rewards: Float[Tensor, " b"], values: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, gamma: float, lam: float
) -> Float[Tensor, "b t"]:
    """A_k = sum over l >= 0 of (gamma lam)^l delta_(k + l) (Schulman et al., 2016, arXiv 1506.02438, eq. 16), as (b, t).

    k counts the unmasked actions of a row, delta_k = r_k + gamma V_(k+1) - V_k, and V after the last action is 0. With ``gamma``
    and ``lam`` 1 this is reward - value. ``advantages + values`` are the returns, the regression targets of the value head.

    Raises ValueError if ``gamma`` or ``lam`` is not in [0, 1], or a reward is infinite.

    Example::

        >>> values, mask = torch.tensor([[0.25, 0.5]]), torch.ones(1, 2, dtype=torch.bool)
        >>> retouch.core.gae.gae(torch.tensor([1.0]), values, mask, gamma=1.0, lam=1.0)
        tensor([[0.7500, 0.5000]])
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma {gamma}, lam {lam}: both must be between 0 and 1")
    if rewards.isinf().any():
        raise ValueError("infinite rewards: every reward must be finite, or NaN where it could not be measured")
    valid = ~rewards.isnan()
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    reward = rewards.float().nan_to_num(0.0)  # set to 0 once the last unmasked action has received it
    advantages = torch.zeros_like(values)
    for k in reversed(range(values.shape[1])):
        here = mask[:, k]
        advantage = reward + gamma * next_value - values[:, k] + gamma * lam * next_advantage
        advantages[:, k] = torch.where(here & valid, advantage, 0.0)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[:, k], next_value)
        reward = reward.masked_fill(here, 0.0)
    return advantages


def discounted_returns(rewards: Float[Tensor, " b"], mask: Bool[Tensor, "b t"], *, gamma: float) -> Float[Tensor, "b t"]:
    """gamma^n times the row's reward, where n is the number of unmasked actions after this one; 0 where masked. (b, t).

    Source: the Monte Carlo return (Sutton & Barto 2018, section 3.3) with a reward only at the end.

    Example::

        >>> retouch.core.discounted_returns(torch.tensor([1.0]), torch.ones(1, 3, dtype=torch.bool), gamma=0.5)
        tensor([[0.2500, 0.5000, 1.0000]])
    """
    after = mask.flip(1).cumsum(1).flip(1) - 1
    return torch.where(mask, rewards.float()[:, None] * gamma ** after.clamp(min=0), 0.0)


def whiten(advantages: Float[Tensor, "n t"], mask: Bool[Tensor, "n t"], *, eps: float = 1e-4) -> Float[Tensor, "n t"]:
    """(advantage - mean) / (std + eps) over all unmasked actions, with the population std; 0 where masked. (n, t).

    Source: advantage normalisation, one of the choices studied by Andrychowicz et al. 2021 (arXiv 2006.05990).

    Example::

        >>> retouch.core.whiten(torch.tensor([[3.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool), eps=0.0)
        tensor([[ 1., -1.]])
    """
    if not mask.any():
        return torch.zeros_like(advantages)
    chosen = advantages[mask].double()
    whitened = (advantages.double() - chosen.mean()) / (chosen.std(correction=0) + eps)
    return whitened.float().masked_fill(~mask, 0.0)


def clipped_value_loss(
    values: Float[Tensor, "b t"],
    old: Float[Tensor, "b t"],
    returns: Float[Tensor, "b t"],
    *,
    clip: float | None,
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, "b t"]:
    """PPO's clipped value loss, 0.5 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), as (b, t).

    A value that has moved by more than ``clip`` towards its return gets no gradient. ``clip`` None gives 0.5 (V - R)^2. The
    formula is not in the PPO paper (arXiv 1707.06347) but in the code OpenAI released with it (baselines, ``ppo2``). Loss and
    gradient are 0 where ``mask`` is False.

    Raises ValueError if ``clip`` is not above 0.

    Example::

        >>> mask = torch.ones(1, 1, dtype=torch.bool)
        >>> retouch.core.clipped_value_loss(torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), clip=None, mask=mask)
        tensor([[0.5000]])
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip {clip}: must be above 0, or None for no clamp")
    values, old, returns = (x.float().masked_fill(~mask, 0.0) for x in (values, old, returns))
    squares = (values - returns).square()
    if clip is not None:
        squares = torch.maximum(squares, (old + (values - old).clamp(-clip, clip) - returns).square())
    return 0.5 * squares


def explained_variance(targets: Float[Tensor, "n t"], values: Float[Tensor, "n t"], mask: Bool[Tensor, "n t"]) -> float:
    """1 - Var(targets - values) / Var(targets) over unmasked actions: 1 for perfect values, 0 for a constant, negative if worse.

    NaN if the targets are all equal.

    Source: the diagnostic of PPO's published implementation (OpenAI baselines).

    Example::

        >>> values, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
        >>> retouch.core.explained_variance(values, values, mask)
        1.0
    """
    chosen, residuals = targets[mask].double(), (targets - values)[mask].double()
    if not len(chosen) or chosen.min() == chosen.max():
        return float("nan")
    return float(1 - residuals.var(correction=0) / chosen.var(correction=0))
