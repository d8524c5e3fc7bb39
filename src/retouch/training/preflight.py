"""A trial step before the first: does learning work at all, in both directions? Asks no judge and restores every bit.

The ratio must be 1 before the step and not 1 after it; gradients finite and not zero; the trained weights moved and the frozen
ones did not; a KL has a gradient once the policy has left the reference.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from retouch.distributed.fsdp import FsdpStepper
from retouch.distributed.head_stepper import HeadStepper
from retouch.objectives.base import Objective
from retouch.objectives.policy_gradient import ActorCritic
from retouch.training.checkpoint import restore_rng, rng_state
from retouch.training.loop import Collected, Phase, Run, accumulate, make_minibatch
from retouch.types import Kind, Minibatch, Needs

TRANSITION_LIMIT = 1e-6
TOKEN_LIMIT = 1e-5
HALF_PRECISION_LIMIT = 1e-2


@dataclass(frozen=True)
class Check:
    """One finding; ``value`` was measured and ``limit`` is what it was held against, where there is one."""

    name: str
    ok: bool
    value: float | None
    limit: float | None
    text: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class PreflightFailed(ValueError):
    """The trial step shows that this run could not learn, or would learn something else."""


def preflight(run: Run, phase: Phase, *, step: int, rows: int) -> list[Check]:
    """Try one step on ``rows`` rows of ``step``, of those that it has, and restore everything. Every rank takes part."""
    trained = {name: p for name, p in run.policy.module.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    frozen = _fingerprints(run)
    optimizer, copies, random = run.stepper.state(), run.policy.copies.state(), rng_state()
    optimizer = {name: tensor.clone() for name, tensor in optimizer.items()}
    copies = {name: tensor.clone() for name, tensor in copies.items()}
    try:
        minibatch = _trial(run, phase, step, rows)
        return [*_tried(run, phase, step, minibatch, before), _check_frozen(run, frozen)]
    finally:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(before[name])
        run.stepper.load(optimizer)
        run.policy.copies.load(copies)
        restore_rng(random)


def require(checks: list[Check]) -> None:
    """PreflightFailed where a check failed, with all that did."""
    failed = [check for check in checks if not check.ok]
    if failed:
        raise PreflightFailed("the trial step failed:\n" + "\n".join(f"  {check.name}: {check.text}" for check in failed))


def _trial(run: Run, phase: Phase, step: int, rows: int) -> Minibatch:
    """A few rows with advantages of both signs, of as many tasks as can be: a policy may be quite sure of one. DPO learns from two
    of one task.
    """
    batch = phase.batch(step)
    pairs = isinstance(phase.objective, Objective) and phase.objective.learns_from_pairs
    apart = 1 if pairs else len(batch) // rows
    batch = batch.take(slice(0, apart * rows, apart))
    act = run.policy.demonstrate if phase.advantage is None else run.policy.rollout
    parts = [act(batch.take(slice(first, first + run.chunk))) for first in range(0, len(batch), run.chunk)]
    trajectory = type(parts[0]).concat(parts)
    signs = torch.ones(len(batch))
    signs[1::2] = -1.0
    advantages = signs[:, None].expand(trajectory.mask.shape)
    valid = torch.ones(len(batch), dtype=torch.bool)
    collected = Collected(batch, trajectory, advantages, valid, {}, returns=advantages)
    return make_minibatch(run, phase, collected, slice(0, len(batch)), epoch=0)


def _tried(run: Run, phase: Phase, step: int, minibatch: Minibatch, before: dict[str, Tensor]) -> Iterator[Check]:
    actor = phase.objective.actor if isinstance(phase.objective, ActorCritic) else phase.objective
    has_ratio = isinstance(actor, Objective) and actor.has_ratio
    if has_ratio:
        off, limit = _ratio_off(run, minibatch), _limit(run, minibatch)
        yield Check(
            "ratio_before",
            off <= limit,
            off,
            limit,
            f"largest |ratio - 1| before the step is {off:.1e}, at most {limit:.0e} allowed",
        )
    accumulate(run, phase.objective, minibatch)
    norm = run.stepper.step(max(phase.learning_rate(step), phase.learning_rate(phase.steps.stop - 1), 1e-6))
    yield Check(
        "gradient",
        norm > 0,
        norm,
        None,
        f"norm of the trial gradient is {norm:.2e}" if norm > 0 else "the trial gradient is exactly 0",
    )
    moved = sum(not torch.equal(before[name], p) for name, p in run.policy.module.named_parameters() if name in before)
    yield Check("moved", moved > 0, moved, None, f"{moved} of {len(before)} trained tensors moved")
    if has_ratio:
        off = _ratio_off(run, minibatch)
        yield Check(
            "ratio_after",
            off > 0,
            off,
            None,
            f"largest |ratio - 1| after the step is {off:.1e}" if off > 0 else "the ratio is still exactly 1 after a step",
        )
    if isinstance(actor, Objective) and actor.kl_kind is not None:
        size = _kl_gradient(run, actor, minibatch)
        yield Check(
            "kl_gradient",
            size > 0,
            size,
            None,
            f"norm of the KL's gradient is {size:.2e}" if size > 0 else "the KL has no gradient",
        )


def _ratio_off(run: Run, minibatch: Minibatch) -> float:
    worst = torch.zeros(())
    for part in run.policy.microbatches(minibatch.trajectory):
        with torch.no_grad():
            evaluation = run.policy.evaluate(minibatch.trajectory, part, Needs())
        mask = minibatch.trajectory.mask[part.rows, part.actions]
        ratio = torch.where(mask, evaluation.log_ratio, 0.0).exp()
        worst = torch.maximum(worst, (ratio - 1).abs().max().cpu())
    return run.ranks.max(worst).item()


def _limit(run: Run, minibatch: Minibatch) -> float:
    if next(run.policy.module.parameters()).dtype != torch.float32:
        return HALF_PRECISION_LIMIT
    transitions = bool((minibatch.trajectory.kind == Kind.TRANSITION).all())
    return TRANSITION_LIMIT if transitions and run.policy.sampling.reduction == "mean" else TOKEN_LIMIT


def _kl_gradient(run: Run, objective: Objective, minibatch: Minibatch) -> float:
    part = next(iter(run.policy.microbatches(minibatch.trajectory)))
    evaluation = run.policy.evaluate(minibatch.trajectory, part, Needs(kl=objective.kl_kind))
    assert evaluation.kl is not None
    stepper = run.stepper.policy if isinstance(run.stepper, HeadStepper) else run.stepper
    if isinstance(stepper, FsdpStepper):  # its gradients come about in backward passes alone
        return stepper.gradient_norm(evaluation.kl.mean())
    parameters = [p for p in run.policy.module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(evaluation.kl.mean(), parameters, allow_unused=True)
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None))


def _fingerprints(run: Run) -> list[Tensor]:
    """A sum and a sum of absolute values of everything frozen in the trained module."""
    frozen = [p.detach() for p in run.policy.module.parameters() if not p.requires_grad] + list(run.policy.module.buffers())
    return [torch.stack([tensor.double().sum(), tensor.double().abs().sum()]) for tensor in frozen if not tensor.is_complex()]


def _check_frozen(run: Run, before: list[Tensor]) -> Check:
    changed = sum(not torch.equal(old, new) for old, new in zip(before, _fingerprints(run), strict=True))
    return Check("frozen", changed == 0, changed, 0, f"{changed} of {len(before)} frozen tensors changed")
