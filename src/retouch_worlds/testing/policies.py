"""The contract of a policy: evaluation reproduces the rollout's log-probabilities, however rows and actions are sliced."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.core.random import generator
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.protocols import Policy, VelocityPolicy
from retouch.types import Batch, Kind, Minibatch, Needs, Slice, Trajectory
from retouch_worlds.testing.assertions import call_twice, relative_distance, require, require_close

ROUNDING = 1e-4
CUT_LIMIT = 1e-5
SINGLE_ACTIONS = 16
"""The number of actions that are evaluated alone. A long trajectory has hundreds, and each evaluation encodes its prompts again."""


def check_policy(policy: Policy, batch: Batch, *, needs: Needs | None = None, ratio_limit: float | None = None) -> None:
    """Raises AssertionError if ``policy`` violates the contract on ``batch``, which should have a few rows of at least two tasks.

    - The random draws of a rollout are keyed by its rows: a second call gives the same bits, and a smaller batch the same rows (up
      to rounding). Nothing is drawn from the global generator, and no weight changes.
    - ``evaluate`` reproduces the rollout: |ratio - 1| is at most ``ratio_limit`` before a step (None: 1e-6 for transitions, which
      holds for means over their elements, and 1e-5 for tokens), and not 0 after the weights have changed.
    - Microbatches cover every row and action once, and the gradient does not depend on the slicing (up to 1e-5 of its norm): by
      microbatches, by rows, and by actions, of which at most 16 are evaluated alone.
    - Masked actions get no gradient, and the values stored for them do not matter.
    - If the trajectory has values, ``evaluate`` reproduces them too, for any slicing.
    - ``needs.kl``: the KL of this kind is 0 while the policy equals its reference, and has a gradient after the weights have
      changed. ``needs.log_ratio`` "norm": the ratio of RatioNorm has the same limit.
    - A ``VelocityPolicy``: row slices cover every row once, and a row's velocity does not depend on the other rows.

    If a rollout consists of whole images without log-probabilities, the checks of log-probabilities are skipped. The weights are
    restored to the bit.

    Example::

        >>> retouch.testing.check_policy(policy, batch)
    """
    needs = Needs() if needs is None else needs
    trained = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    require(len(trained) > 0, "no parameter of policy.module requires a gradient")
    trajectory = _check_rollout(policy, batch)
    middle = (len(trajectory) + 1) // 2
    joined = type(trajectory).concat([trajectory.take(slice(0, middle)), trajectory.take(slice(middle, len(trajectory)))])
    for name in ("log_probs", "mask", "kind"):
        a, b = getattr(joined, name), getattr(trajectory, name)
        require(torch.equal(a.nan_to_num(), b.nan_to_num()), f"{name} changes when rows are sliced and concatenated")
    _check_outputs(joined.outputs, trajectory.outputs, limit=0.0, what="outputs sliced and concatenated")
    if isinstance(policy, VelocityPolicy):
        _check_velocity(policy, trajectory, trained)
    if (trajectory.kind == Kind.IMAGE).all():
        return
    usual = 1e-6 if (trajectory.kind == Kind.TRANSITION).all() else 1e-5
    limit = usual if ratio_limit is None else ratio_limit
    parts = list(policy.microbatches(trajectory))
    covered = torch.zeros(trajectory.mask.shape, dtype=torch.long)
    for part in parts:
        covered[part.rows, part.actions] += 1
    wrong = [tuple(place) for place in (covered != 1).nonzero().tolist()]
    require(
        not wrong, f"microbatches cover (row, action) {wrong[:4]} {[int(covered[place]) for place in wrong[:4]]} times, not once"
    )
    for log_ratio in dict.fromkeys(("plain", needs.log_ratio)):
        deviation = _max_ratio_deviation(policy, trajectory, Needs(log_ratio=log_ratio))
        require(
            deviation <= limit,
            f"evaluate does not reproduce the rollout: |ratio - 1| is {deviation:.2e} ({log_ratio}); the limit is {limit:.0e}",
        )
    _check_slicing(policy, trajectory, trained)
    rows, actions = trajectory.mask.shape
    checkers = (torch.arange(rows)[:, None] + torch.arange(actions)) % 2 == 0
    mask = trajectory.mask & checkers.to(trajectory.mask.device)
    coefficients = _coefficients(trajectory) * mask
    halved = replace(trajectory, mask=mask, log_probs=trajectory.log_probs.masked_fill(~mask, torch.nan))
    minibatch = Minibatch(batch, halved, advantages=coefficients.masked_fill(~mask, 1e6), weights=mask.float())
    losses = [loss.value for loss in PolicyGradient(clip_low=0.5, clip_high=0.5).losses(policy, minibatch)]
    found = _grad(-torch.stack(losses).sum(), trained)
    expected = _gradient(policy, trajectory, policy.microbatches(trajectory), coefficients, trained)
    distance = relative_distance(found, expected)
    require(distance <= ROUNDING, f"masked actions change the gradient by {distance:.2e} of its norm")
    if trajectory.values is not None:
        _check_values(policy, trajectory, trajectory.values)
    _check_changed_weights(policy, trajectory, trained, needs)


def _check_rollout(policy: Policy, batch: Batch) -> Trajectory:
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in policy.module.named_parameters()}
    trajectory, again = call_twice(lambda: policy.rollout(batch), "rollout")
    for name, parameter in policy.module.named_parameters():
        value, trains = before[name]
        require(torch.equal(parameter, value), f"rollout changed {name}")
        require(parameter.requires_grad == trains, f"rollout changed requires_grad of {name}")
    shape = tuple(trajectory.mask.shape)
    require(len(trajectory) == len(batch) == shape[0], f"{len(trajectory)} rows for a batch of {len(batch)}")
    require(tuple(trajectory.log_probs.shape) == tuple(trajectory.kind.shape) == shape, "log_probs, mask and kind differ in shape")
    require(trajectory.log_probs.dtype == torch.float32, f"log_probs are {trajectory.log_probs.dtype}, not float32")
    require(not trajectory.log_probs.requires_grad, "a rollout's log_probs carry a gradient")
    require_close(trajectory.log_probs, again.log_probs, limit=0.0, what="log_probs of a rollout and the same rollout again")
    _check_outputs(trajectory.outputs, again.outputs, limit=0.0, what="outputs of a rollout and the same rollout again")
    for rows in (slice(0, 1), slice(len(batch) // 2, len(batch))):
        alone, where = policy.rollout(batch.take(rows)), f"rows {rows.start} to {rows.stop} rolled out alone"
        require_close(alone.log_probs, trajectory.log_probs[rows], limit=ROUNDING, what=f"log_probs of {where}")
        _check_outputs(alone.outputs, trajectory.take(rows).outputs, limit=ROUNDING, what=f"outputs of {where}")
    return trajectory


def _check_outputs(a: Any, b: Any, *, limit: float, what: str) -> None:
    if isinstance(a, Tensor):
        require_close(a, b, limit=limit, what=what)
    else:
        require(a == b, f"{what}: {a} and {b} differ")


def _max_ratio_deviation(policy: Policy, trajectory: Trajectory, needs: Needs) -> float:
    """The largest |ratio - 1|, evaluated with gradient as in training."""
    largest = 0.0
    for part in policy.microbatches(trajectory):
        evaluation, mask = policy.evaluate(trajectory, part, needs), trajectory.mask[part.rows, part.actions]
        require(
            evaluation.log_probs.shape == mask.shape, f"evaluate gives {tuple(evaluation.log_probs.shape)} for {tuple(mask.shape)}"
        )
        deviation = (evaluation.log_ratio.detach()[mask].exp() - 1).abs()
        require(bool(deviation.isfinite().all()), f"{int((~deviation.isfinite()).sum())} ratios of {part} are not finite")
        largest = max(largest, float(deviation.max()) if deviation.numel() else 0.0)
    return largest


def _check_slicing(policy: Policy, trajectory: Trajectory, trained: Sequence[Tensor]) -> None:
    rows, actions = trajectory.mask.shape
    coefficients = _coefficients(trajectory)
    whole = _gradient(policy, trajectory, [Slice(slice(0, rows), slice(0, actions))], coefficients, trained)
    require(any(bool(part.any()) for part in whole), "the gradient of the log-probabilities is exactly 0")
    # Slices of one action each, ``SINGLE_ACTIONS`` of them at equal distances, and of all actions between two of them.
    singles = torch.linspace(0, actions - 1, min(actions, SINGLE_ACTIONS)).round().long().tolist()
    ends = pairwise(sorted({*singles, *(single + 1 for single in singles), 0, actions}))
    slicings = {
        "the policy's own microbatches": policy.microbatches(trajectory),
        "one row at a time": (Slice(slice(row, row + 1), slice(0, actions)) for row in range(rows)),
        "single actions": (Slice(slice(0, rows), slice(first, end)) for first, end in ends),
    }
    for name, parts in slicings.items():
        distance = relative_distance(_gradient(policy, trajectory, parts, coefficients, trained), whole)
        require(
            distance <= CUT_LIMIT,
            f"the gradient depends on the slicing: with {name} it differs by {distance:.2e}; the limit is {CUT_LIMIT:.0e}",
        )


def _gradient(
    policy: Policy, trajectory: Trajectory, parts: Iterable[Slice], coefficients: Tensor, trained: Sequence[Tensor]
) -> list[Tensor]:
    total = [torch.zeros_like(parameter) for parameter in trained]
    for part in parts:
        log_probs = policy.evaluate(trajectory, part, Needs()).log_probs
        counts = coefficients[part.rows, part.actions]
        loss = (counts * log_probs.masked_fill(counts == 0, 0.0)).sum()
        total = [a + b for a, b in zip(total, _grad(loss, trained), strict=True)]
    return total


def _grad(loss: Tensor, trained: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(trained), allow_unused=True)
    return [torch.zeros_like(p) if gradient is None else gradient for p, gradient in zip(trained, found, strict=True)]


def _coefficients(trajectory: Trajectory) -> Float[Tensor, "b t"]:
    """A random weight of either sign for every unmasked action, so that errors do not cancel."""
    drawn = torch.randn(trajectory.mask.shape, generator=generator("retouch.testing", "coefficients"))
    return drawn.to(trajectory.mask.device) * trajectory.mask


def _check_values(policy: Policy, trajectory: Trajectory, values: Tensor) -> None:
    rows, actions = trajectory.mask.shape
    require(
        tuple(values.shape) == (rows, actions) and values.dtype == torch.float32, f"values are {tuple(values.shape)} {values.dtype}"
    )
    require(not values.requires_grad, "a rollout's values carry a gradient")
    cuts = [Slice(slice(row, row + 1), slice(action, action + 1)) for row in range(rows) for action in range(actions)]
    for part in [*policy.microbatches(trajectory), *cuts]:
        found = policy.evaluate(trajectory, part, Needs(values=True)).values
        require(found is not None, f"evaluate gives no values for {part}")
        assert found is not None
        mask = trajectory.mask[part.rows, part.actions]
        expected = values[part.rows, part.actions][mask]
        require_close(found.detach()[mask], expected, limit=ROUNDING, what=f"values of {part} and those of the rollout")


def _check_changed_weights(policy: Policy, trajectory: Trajectory, trained: Sequence[Tensor], needs: Needs) -> None:
    if needs.kl is not None:
        kl, _ = _kl(policy, trajectory, needs, trained)
        require(kl <= 1e-6, f"the {needs.kl} KL is {kl:.2e} at the reference, not 0")
    before = [parameter.detach().clone() for parameter in trained]
    random = generator("retouch.testing", "moved")
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=random).to(parameter))
    try:
        deviation = _max_ratio_deviation(policy, trajectory, Needs())
        require(deviation > 0, "the ratio is still exactly 1 after the weights have changed")
        if needs.kl is not None:
            kl, gradient = _kl(policy, trajectory, needs, trained)
            require(kl > 0, f"the {needs.kl} KL is still 0 after the weights have changed: the reference changes with them")
            finite = all(bool(part.isfinite().all()) for part in gradient)
            require(finite and any(bool(part.any()) for part in gradient), f"the {needs.kl} KL has no usable gradient")
    finally:  # restored to the bit
        with torch.no_grad():
            for parameter, kept in zip(trained, before, strict=True):
                parameter.copy_(kept)


def _kl(policy: Policy, trajectory: Trajectory, needs: Needs, trained: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
    columns = []
    for part in policy.microbatches(trajectory):
        kl = policy.evaluate(trajectory, part, needs).kl
        require(kl is not None, f"evaluate returns no KL, but {needs} requires one")
        assert kl is not None
        columns.append(kl[trajectory.mask[part.rows, part.actions]])
    values = torch.cat(columns)
    return float(values.detach().abs().max()), _grad(values.sum(), trained)


def _check_velocity(policy: VelocityPolicy, trajectory: Trajectory, trained: Sequence[Tensor]) -> None:
    covered = torch.zeros(len(trajectory), dtype=torch.long)
    parts = list(policy.row_slices(trajectory))
    for rows in parts:
        covered[rows] += 1
    require(bool((covered == 1).all()), f"row_slices cover the rows {covered.tolist()} times, not once each")
    x = trajectory.outputs
    sigma = torch.linspace(0.2, 0.9, len(x), device=x.device)
    everything = slice(0, len(x))
    whole = policy.velocity(trajectory, everything, x, sigma, "current")
    require(whole.shape == x.shape and whole.dtype == torch.float32, f"velocity gives {tuple(whole.shape)} in {whole.dtype}")
    require(whole.requires_grad, "the current velocity carries no gradient")
    direction = torch.randn(whole.shape, generator=generator("retouch.testing", "direction")).to(whole)
    expected, found = _grad((direction * whole).sum(), trained), [torch.zeros_like(parameter) for parameter in trained]
    for rows in parts:
        velocity = policy.velocity(trajectory, rows, x[rows], sigma[rows], "current")
        require_close(velocity, whole[rows], limit=ROUNDING, what=f"velocity of rows {rows.start} to {rows.stop} alone")
        found = [a + b for a, b in zip(found, _grad((direction[rows] * velocity).sum(), trained), strict=True)]
    distance = relative_distance(found, expected)
    require(
        distance <= CUT_LIMIT,
        f"the velocity's gradient depends on the slicing: it differs by {distance:.2e}; the limit is {CUT_LIMIT:.0e}",
    )
