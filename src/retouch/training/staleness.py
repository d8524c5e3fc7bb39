"""Rollouts that run ahead of learning (``rollout.staleness``).

Before a step learns, the rollouts of up to ``staleness`` steps after it have been made, and their rewards are being computed. When
its turn comes, the log-probabilities of a stale rollout are computed again under the current weights. The ratio of the surrogate is
relative to these, so that it is 1 before the first update and the clip range limits the change of one step. That other weights
sampled the actions is corrected by an importance weight, which has no gradient: current over acting probability, truncated at
``truncate_at``. Of the weights, the mean of a surrogate over stale actions is one over those of the current policy.

Sources: decoupled PPO (Hilton et al. 2021, arXiv 2110.00641); its use for asynchronous rollouts (AReaL, arXiv 2505.24298);
truncated importance sampling (Ionides 2008).

The rollout of step r is made under the weights with which step max(first step of the phase, r - staleness) began. These weights are
kept as copies and saved in checkpoints, and draws are keyed by the step, so a resumed run makes the rollouts of its queue again,
bit for bit; scores are read from the ledger.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.core.surrogates import importance_weights
from retouch.distributed.ranks import Ranks
from retouch.policies.weights import stale_copies
from retouch.training.loop import Collected, Metrics, Phase, RolledOut, Run, begin_collecting, finish_collecting
from retouch.types import Needs, Trajectory


def collect_ahead(run: Run, phase: Phase, start: int, *, staleness: int, truncate_at: float) -> Iterator[Collected]:
    """What each step of the phase learns from, from ``start`` on. The caller takes the step before it asks for the next one."""
    first, stop = phase.steps.start, phase.steps.stop
    copies, names = run.policy.copies, stale_copies(staleness)
    queue: deque[RolledOut] = deque()
    for step in range(start, stop):
        for coming in range(step + len(queue), min(step + staleness + 1, stop)):
            acting = max(first, coming - staleness)
            with nullcontext() if acting == step else copies.using(names[acting % staleness]):
                queue.append(begin_collecting(run, phase.batch(coming)))
        age = step - max(first, step - staleness)
        made = finish_collecting(run, phase, queue.popleft())
        collected = under_current_weights(run, made, age=age, truncate_at=truncate_at)
        # It replaces the weights that sampled this step, so not before the rewards are there: a checkpoint may be saved until then.
        copies.snapshot(names[step % staleness])
        yield collected


def under_current_weights(run: Run, collected: Collected, *, age: int, truncate_at: float) -> Collected:
    """A stale rollout with the log-probabilities of the current weights, and the importance weights of its actions.

    ``age``: the steps that were taken since the weights that sampled it. Metrics: ``staleness/steps`` is the age,
    ``staleness/weight`` the mean of the weights, ``staleness/truncated`` the share of them that is truncated, and
    ``staleness/kl`` the mean of log acting - log current, which estimates the KL divergence of the current policy from the acting
    one.
    """
    if age == 0:
        return replace(collected, metrics={**collected.metrics, "staleness/steps": 0.0})
    trajectory = collected.trajectory
    acting, mask = trajectory.log_probs, trajectory.mask
    with run.clock("stale"):
        current = _log_probs(run, trajectory)
        weights = importance_weights(current, acting, mask, cap=truncate_at)
    metrics = {"staleness/steps": float(age), **_weight_metrics(run.ranks, (current - acting)[mask], cap=truncate_at)}
    return replace(
        collected,
        trajectory=trajectory.with_log_probs(current),
        importance=weights.to(collected.advantages.device),
        metrics={**collected.metrics, **metrics},
    )


@torch.no_grad()
def _log_probs(run: Run, trajectory: Trajectory) -> Float[Tensor, "b t"]:
    found = torch.zeros_like(trajectory.log_probs)
    for part in run.policy.microbatches(trajectory):
        found[part.rows, part.actions] = run.policy.evaluate(trajectory, part, Needs()).log_probs
    return found


def _weight_metrics(ranks: Ranks, log_weights: Float[Tensor, " n"], *, cap: float) -> Metrics:
    weights = log_weights.double().exp()
    sums = [weights.clamp(max=cap).sum(), (weights > cap).sum(), -log_weights.double().sum(), torch.ones_like(weights).sum()]
    weight, truncated, kl, count = ranks.sum(torch.stack([each.double().cpu() for each in sums])).tolist()
    count = max(count, 1.0)
    return {"staleness/weight": weight / count, "staleness/truncated": truncated / count, "staleness/kl": kl / count}
