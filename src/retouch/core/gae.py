"""Advantages from a learned value: what a row earned after an action beyond what was expected before it.

The reward of a row (b,) comes with its last action. ``values`` (b, t) are what the value head, as it was when the row was made,
expected before each action. Where ``mask`` is False there was no choice (a forced token, or what follows the end): no time passes
there, and the advantage is 0. NaN is a missing reward: all advantages of that row are exactly 0. fp32 throughout.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def gae(
    rewards: Float[Tensor, " b"], values: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"], *, gamma: float, lam: float
) -> Float[Tensor, "b t"]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438): sum over l of (gamma lam)^l delta_(k + l).

    k counts the row's choices, delta_k = r_k + gamma V_(k+1) - V_k, and V after the last is 0. With ``gamma`` and ``lam`` 1 it is
    the reward less the value. ``advantages + values`` are the returns that the values learn. ValueError: either is not in [0, 1],
    or a reward is infinite.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma {gamma}, lam {lam}: both lie between 0 and 1")
    if rewards.isinf().any():
        raise ValueError("infinite rewards: a reward that could not be measured is NaN, and any other must be finite")
    valid = ~rewards.isnan()
    following = torch.zeros_like(values[:, 0])  # the value of the next choice
    further = torch.zeros_like(following)  # its advantage
    coming = rewards.float().nan_to_num(0.0)  # the reward, until its action is met
    advantages = torch.zeros_like(values)
    for k in reversed(range(values.shape[1])):
        here = mask[:, k]
        advantage = coming + gamma * following - values[:, k] + gamma * lam * further
        advantages[:, k] = torch.where(here & valid, advantage, 0.0)
        further = torch.where(here, advantage, further)
        following = torch.where(here, values[:, k], following)
        coming = coming.masked_fill(here, 0.0)
    return advantages


def discounted(rewards: Float[Tensor, " b"], mask: Bool[Tensor, "b t"], *, gamma: float) -> Float[Tensor, "b t"]:
    """What is still to come at each choice, no value asked: gamma to the power of the choices after it, times the reward."""
    after = mask.flip(1).cumsum(1).flip(1) - 1
    return torch.where(mask, rewards.float()[:, None] * gamma ** after.clamp(min=0), 0.0)


def whitened(advantages: Float[Tensor, "n t"], counted: Bool[Tensor, "n t"], *, eps: float = 1e-4) -> Float[Tensor, "n t"]:
    """Advantages less their mean, over (their standard deviation + eps), over all actions that are counted; 0 elsewhere."""
    if not counted.any():
        return torch.zeros_like(advantages)
    chosen = advantages[counted].double()
    away = (advantages.double() - chosen.mean()) / (chosen.std(correction=0) + eps)
    return away.float().masked_fill(~counted, 0.0)


def clipped_value_loss(
    values: Float[Tensor, "b t"],
    old: Float[Tensor, "b t"],
    returns: Float[Tensor, "b t"],
    *,
    clip: float | None,
    mask: Bool[Tensor, "b t"],
) -> Float[Tensor, "b t"]:
    """Half the squared distance from the return, or from there that of ``old + clamp(values - old, -clip, clip)`` if it is larger.

    So a value that has moved by more than ``clip`` towards its return gets no gradient (not in the paper, arXiv 1707.06347, but in
    the code that came with it); None never clips. 0, with no gradient, where ``mask`` is False. ValueError: ``clip`` is not above
    0.
    """
    if clip is not None and not clip > 0:
        raise ValueError(f"clip {clip}: must be above 0, or None for no clamp")
    values, old, returns = (x.float().masked_fill(~mask, 0.0) for x in (values, old, returns))
    squares = (values - returns).square()
    if clip is not None:
        squares = torch.maximum(squares, (old + (values - old).clamp(-clip, clip) - returns).square())
    return 0.5 * squares


def explained_variance(targets: Float[Tensor, "n t"], values: Float[Tensor, "n t"], counted: Bool[Tensor, "n t"]) -> float:
    """1 - Var(targets - values) / Var(targets) over what is counted: 1 is a perfect value, 0 as good as a constant, below is worse.

    NaN where the targets are all equal.
    """
    wanted, off = targets[counted].double(), (targets - values)[counted].double()
    if not len(wanted) or wanted.min() == wanted.max():
        return float("nan")
    return float(1 - off.var(correction=0) / wanted.var(correction=0))
