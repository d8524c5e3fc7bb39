"""Rollouts that run ahead of learning (``rollout.staleness``).

Before the update of a step, the rollouts of up to ``staleness`` later steps have been made, and their rewards are being computed.
When the update of a stale rollout begins, its log-probabilities are computed again under the current weights. The ratio of the
surrogate is relative to them, so it is 1 before the first update, and the clip range limits the change of one step. An importance
weight without gradient corrects for the older weights that sampled the actions: the probability under the current weights divided
by the probability under the weights that sampled, truncated at ``truncate_at``. With it, and except for the truncation, the mean of
a surrogate over stale actions estimates its mean over actions of the current policy.

Sources: decoupled PPO (Hilton et al. 2021, arXiv 2110.00641); its use for asynchronous rollouts (AReaL, arXiv 2505.24298);
truncated importance sampling (Ionides 2008).

The rollout of step r is made under the weights with which step max(first step of the phase, r - staleness) began. These weights are
kept as copies and saved in checkpoints, and random draws are keyed by the step, so a resumed run makes the rollouts of its queue
again, bit for bit; their scores are read from the ledger.
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
from retouch.training.loop import Metrics, PendingRollout, Phase, Run, ScoredRollout, begin_collecting, finish_collecting
from retouch.types import Needs, Trajectory


def collect_ahead(run: Run, phase: Phase, start: int, *, staleness: int, truncate_at: float) -> Iterator[ScoredRollout]:
    """Yield the training data of each step of the phase from ``start`` on. The caller updates before it asks for the next step."""
    first, stop = phase.steps.start, phase.steps.stop
    copies, names = run.policy.copies, stale_copies(staleness)
    queue: deque[PendingRollout] = deque()
    for step in range(start, stop):
        for coming in range(step + len(queue), min(step + staleness + 1, stop)):
            acting = max(first, coming - staleness)
            with nullcontext() if acting == step else copies.using(names[acting % staleness]):
                queue.append(begin_collecting(run, phase.batch(coming)))
        age = step - max(first, step - staleness)
        made = finish_collecting(run, phase, queue.popleft())
        collected = under_current_weights(run, made, age=age, truncate_at=truncate_at)
        # The snapshot replaces the weights that sampled this step. It is taken after the rewards arrived, because a checkpoint may
        # be saved until then.
        copies.snapshot(names[step % staleness])
        yield collected


def under_current_weights(run: Run, collected: ScoredRollout, *, age: int, truncate_at: float) -> ScoredRollout:
    """Return a stale rollout with the log-probabilities of the current weights, and the importance weights of its actions.

    ``age``: the number of steps since the weights that sampled the rollout. Metrics: ``staleness/steps`` is the age,
    ``staleness/weight`` the mean importance weight, ``staleness/truncated`` the fraction of truncated weights, and ``staleness/kl``
    the mean of log old - log current probability, which estimates the KL divergence of the current policy from the policy that
    sampled.
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
