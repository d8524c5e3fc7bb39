"""The contracts of an objective, an advantage, a transition and a window, and a small policy with which to check an objective."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.core.surrogates import loss_weights
from retouch.objectives.advantages import Advantage
from retouch.objectives.base import Objective
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.rollout import CPSTransition, DenoisingRollout, Transition, Window
from retouch.policies.weights import WeightCopies
from retouch.types import Batch, Minibatch
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.testing.assertions import call_twice, relative_distance, require, require_close

CUT_LIMIT = 1e-4
"""Largest relative difference between gradients of one minibatch that is divided into microbatches in two ways."""


def check_objective(objective: Objective, policy: Any, batch: Batch) -> None:
    """Raises AssertionError if ``objective`` violates the contract; ``batch`` should have several samples of each of two tasks.

    - The losses are finite, are the same on a second call, draw nothing from the global generator, and have a gradient.
    - The gradient does not depend on the size of the microbatches (``policy.microbatch``), up to 1e-4.
    - Rows of weight 0 do not change the gradient, whatever their advantages.
    - ``policy/loss`` in the metrics is the sum of the losses of the microbatches.

    Example::

        >>> retouch.testing.check_objective(retouch.GRPO(clip=1e-4), policy, batch)
    """
    trajectory = objective.demonstrate(policy, batch) if objective.imitates else policy.rollout(batch)
    rows, device = len(batch), trajectory.mask.device
    mask, valid = trajectory.mask.cpu(), torch.ones(rows, dtype=torch.bool)
    weights = loss_weights(mask, valid, normalise="sequence")
    slots = torch.tensor(batch.slot, dtype=torch.float32)
    advantages = (slots - slots.mean())[:, None].expand(trajectory.mask.shape)
    minibatch = Minibatch(batch, trajectory, advantages.to(device), weights.to(device))
    trained = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    require(len(trained) > 0, "no parameter of policy.module requires a gradient")
    built = objective.build()
    (gradient, losses), (again, _) = call_twice(lambda: _gradient(built, policy, minibatch, trained), "losses")
    require(all(bool(tensor.isfinite().all()) for tensor in gradient), "the gradient of the loss is not finite")
    require(any(bool(tensor.any()) for tensor in gradient), "the loss has no gradient")
    require(all(torch.equal(a, b) for a, b in zip(gradient, again, strict=True)), "two calls with the same minibatch differ")
    total = sum(float(loss.value.detach()) for loss in losses)
    logged = sum(float(loss.sums.get("policy/loss", float("nan"))) for loss in losses)
    close = abs(total - logged) <= 1e-5 * max(1.0, abs(total))
    require(close, f"policy/loss is {logged:.6g}, and the shares sum to {total:.6g}; log the detached value of each share")
    microbatch = policy.microbatch
    try:
        policy.microbatch = 2 * microbatch
        other, _ = _gradient(built, policy, minibatch, trained)
    finally:
        policy.microbatch = microbatch
    distance = relative_distance(other, gradient)
    require(
        distance <= CUT_LIMIT, f"larger microbatches change the gradient by {distance:.1e}; sum the shares, do not average them"
    )
    weights, advantages = minibatch.weights.clone(), minibatch.advantages.clone()
    first = torch.tensor(batch.group) == batch.group[0]
    weights[first] = 0.0
    without = replace(minibatch, weights=weights)
    before, _ = _gradient(built, policy, without, trained)
    advantages[first] *= -3.0
    after, _ = _gradient(built, policy, replace(without, advantages=advantages), trained)
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    require(same, "the advantages of rows with weight 0 change the gradient; multiply each row's loss by its weight")


def _gradient(built: Any, policy: Any, minibatch: Minibatch, trained: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """The gradient of the sum of all shares, and the shares."""
    total, losses = [torch.zeros_like(parameter) for parameter in trained], []
    for loss in built.losses(policy, minibatch):
        found = torch.autograd.grad(loss.value, trained, allow_unused=True)
        total = [old if new is None else old + new for old, new in zip(total, found, strict=True)]
        losses.append(loss)
    require(len(losses) > 0, "losses yields nothing")
    return total, losses


def check_advantage(advantage: Advantage, *, reward_range: tuple[float, float] = (0.0, 1.0)) -> None:
    """Raises AssertionError if ``advantage`` violates the contract on random rewards within ``reward_range``.

    - It returns one float32 number per row, which is finite if the rewards are finite, and the same on a second call.
    - Permuting the rows permutes the advantages; renumbering the groups does not change them.
    - A missing reward (NaN) leaves the advantages of other groups finite.

    Example::

        >>> retouch.testing.check_advantage(retouch.GroupAdvantage())
    """
    low, high = reward_range
    rewards = low + (high - low) * torch.rand(24, generator=generator("check_advantage"))
    group = torch.arange(24) // 4

    def compute(values: Tensor, of: Tensor) -> Tensor:
        return advantage(values, of, reward_range=reward_range)

    found, again = call_twice(lambda: compute(rewards.clone(), group), "the advantage")
    require(found.shape == rewards.shape, f"advantages are {tuple(found.shape)}, rewards {tuple(rewards.shape)}; return one a row")
    require(found.dtype == torch.float32, f"advantages are {found.dtype}, not float32")
    require(bool(found.isfinite().all()), "advantages of finite rewards are not finite")
    require(torch.equal(found, again), "two calls with the same rewards differ")
    order = torch.randperm(24, generator=generator("check_advantage", 1))
    require_close(compute(rewards[order], group[order]), found[order], limit=1e-5, what="advantages of permuted rows")
    require_close(compute(rewards, 5 - group), found, limit=1e-5, what="advantages of renumbered groups")
    missing = rewards.clone()
    missing[0] = torch.nan
    finite = compute(missing, group)[4:]
    require(bool(finite.isfinite().all()), "a missing reward (NaN) makes advantages of other groups NaN; ignore missing rewards")


def check_transition(transition: Transition) -> None:
    """Raises AssertionError if ``transition`` violates the contract on random latents, for both reductions.

    - Evaluating the sampled next x gives the log-probability of the rollout (1e-6), which is finite where ``step_std`` is not 0.
    - Without noise the next x is the mean, and 4096 samples have the standard deviation ``step_std`` to 5 %.
    - The log-probability has a gradient through the velocity, and the sampled x has none.

    A transition that is not stochastic passes without a check.

    Example::

        >>> retouch.testing.check_transition(retouch.SDETransition(noise_level=0.7))
    """
    if not transition.stochastic:
        return
    key = generator("check_transition")
    x, velocity = torch.randn(4096, 3, generator=key), torch.randn(4096, 3, generator=key).requires_grad_()
    sigma, sigma_next = torch.full((4096,), 0.7), torch.full((4096,), 0.5)
    for reduction in ("mean", "sum"):
        extra: dict[str, Any] = {"sigma_max": torch.tensor(0.9), "reduction": reduction}
        noise = torch.randn(4096, 3, generator=key)
        sampled = transition.step(x, velocity, sigma, sigma_next, noise=noise, **extra)
        evaluated = transition.step(x, velocity, sigma, sigma_next, next=sampled.next, **extra)
        require_close(evaluated.log_prob, sampled.log_prob, limit=1e-6, what="log_prob of the rollout and of evaluation")
        require(bool(sampled.log_prob[sampled.step_std > 0].isfinite().all()), "log_prob is not finite where step_std is above 0")
        require(not sampled.next.requires_grad, "the sampled next carries a gradient; detach it")
        (slope,) = torch.autograd.grad(evaluated.log_prob.sum(), velocity)
        require(bool(slope.any()), "log_prob has no gradient through the velocity")
        still = transition.step(x, velocity, sigma, sigma_next, noise=torch.zeros_like(noise), **extra)
        require_close(still.next, still.mean, limit=1e-6, what="next without noise and the mean")
        spread = (sampled.next - sampled.mean).detach().std().item()
        wanted = sampled.step_std[0].item()
        require(abs(spread - wanted) <= 0.05 * wanted, f"standard deviation of samples {spread:.3g}, step_std {wanted:.3g}")


def check_window(window: Window, *, num_steps: int = 10) -> None:
    """Raises AssertionError if ``window`` violates the contract for chains of ``num_steps`` denoising steps.

    - ``actions`` is a non-empty ``range`` within the chain, without the last denoising step, in each of 50 training steps.
    - It depends on (seed, step) only, so that it is the same on every rank.

    Example::

        >>> from retouch.policies.rollout import SlidingWindow
        >>> retouch.testing.check_window(SlidingWindow(size=2, every=5, stride=1))
    """
    for step in range(50):
        first, again = call_twice(lambda step=step: window.actions(num_steps=num_steps, seed=3, step=step), "the window")  # type: ignore[misc]
        require(first == again, f"step {step}: two calls give {first} and {again}")
        require(isinstance(first, range) and first.step == 1 and len(first) > 0, f"step {step}: {first!r} is no range of steps")
        require(
            first.start >= 0 and first.stop <= num_steps - 1,
            f"step {step}: {first} is not within [0, {num_steps - 1}): the last step never trains",
        )
    if window.length is not None:
        require(len(first) == window.length, f"length says {window.length}, and the window has {len(first)} steps")


def playground_policy(rollout: DenoisingRollout | None = None, *, microbatch: int = 3) -> tuple[Any, Batch]:
    """The playground's editor as a policy, and a batch of two tasks with three samples each; all on the CPU, in seconds.

    ``rollout``: how the policy samples; None uses 3 steps of the transition ``cps``. The attention of the last transformer block is
    trainable. The policy keeps copies of its weights as ``reference`` and ``old``.

    Example::

        >>> policy, batch = retouch.testing.playground_policy()
        >>> len(batch.tasks), len(batch)
        (2, 6)
    """
    model = PlaygroundModel().build(device=torch.device("cpu"))
    module: nn.Module = model.module
    module.requires_grad_(False).eval()
    last = list(module.transformer_blocks)[-1]  # type: ignore[arg-type]
    last.attn.requires_grad_(True)
    copies = WeightCopies(module)
    for name in ("reference", "old"):
        copies.snapshot(name)
    sampling = DenoisingRollout(num_steps=3, transition=CPSTransition(noise_level=0.7)) if rollout is None else rollout
    policy = DenoisingPolicy(model, sampling=sampling, eval_steps=3, microbatch=microbatch, copies=copies)
    tasks = tuple(PlaygroundData(count=2, complexity={1: 1.0}).tasks(in_turn=True)[:])
    group, slot = (0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2)
    return policy, Batch(seed=0, step=0, tasks=tasks, group_ids=(0, 1), group=group, slot=slot)
