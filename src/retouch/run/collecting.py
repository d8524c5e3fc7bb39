"""Other ways to collect the samples of a step: ahead of it with older weights, or with further tasks in place of groups whose
samples all have the same reward.

Replaces groups of equal rewards with samples of other tasks (``rollout.refill``).

A group whose rewards are all equal has the advantage 0, so a step with many such groups learns little. After the rewards of a step
are known, such groups are sampled again with other tasks, in at most ``rounds`` rounds. A new group takes the rows, on the same
ranks, of the group that it replaces. Groups with fewer than two scores are not replaced, because missing scores say nothing about
the task; ``reward.max_missing`` limits them.

Source: dynamic sampling of DAPO (arXiv 2503.14476), which samples whole batches until enough prompts have unequal rewards.

Tasks and random draws are keyed by the step and the round, and the group ids of round k start at k times ``tasks_per_step``, so a
resumed run makes the same samples and reads their scores from the ledger.

Rollouts that run ahead of learning (``rollout.staleness``).

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from retouch.core.advantages import equal_groups
from retouch.core.surrogates import importance_weights
from retouch.distributed.ranks import Ranks
from retouch.policies.weights import stale_copies
from retouch.rewards.judging import ScoredBatch
from retouch.run.step import (
    Metrics,
    PendingRollout,
    Phase,
    Run,
    ScoredRollout,
    assign_credit,
    begin_collecting,
    compute_advantages,
    finish_collecting,
    in_global_order,
    wait_for_rewards,
)
from retouch.types import Batch, Needs, Task, Trajectory


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


Further = Callable[[int, int], Sequence[Task]]
"""Maps a step and a round (from 1) to the tasks of that round, one for each group of the step."""


def collect_refilled(run: Run, phase: Phase, start: int, *, rounds: int, further: Further) -> Iterator[ScoredRollout]:
    """Yield the training data of each step of the phase from ``start`` on."""
    for step in range(start, phase.steps.stop):
        yield collect_step(run, phase, step, rounds=rounds, further=further)


def collect_step(run: Run, phase: Phase, step: int, *, rounds: int, further: Further) -> ScoredRollout:
    """Sample and score a step, and replace its groups of equal rewards.

    The reward metrics describe the step's original tasks, as without refill. ``refill/rounds``: the number of rounds that were
    sampled. ``refill/samples``: the number of samples that were made, over all ranks. ``refill/dropped_fraction``: the fraction of
    all sampled groups that were replaced. ``refill/equal_fraction``: the fraction of groups whose rewards are still all equal.
    """
    made = begin_collecting(run, phase.batch(step))
    with run.clock("judge"):
        judged = wait_for_rewards(run.ranks, made.pending)
    _, own = compute_advantages(run, phase, judged)
    groups = int(phase.group.max()) + 1
    dropped, samples, turn = 0, len(phase.order), 0
    while len(equal := equal_groups(in_global_order(run, phase, judged.rewards), phase.group)) and turn < rounds:
        turn += 1
        dropped += len(equal)
        rows, wanted = rows_to_sample(phase, equal, rank=run.ranks.rank, world=run.ranks.world)
        samples += len(rows) * run.ranks.world
        new = begin_collecting(run, with_tasks(made.batch.take(rows.tolist()), further(step, turn), groups=groups, turn=turn))
        with run.clock("judge"):
            scores = wait_for_rewards(run.ranks, new.pending)
        made, judged = replace_rows(made, judged, rows[wanted], new=new, scores=scores, taken=wanted)
    metrics = {
        "refill/rounds": float(turn),
        "refill/samples": float(samples),
        "refill/dropped_fraction": dropped / (groups + dropped),
        "refill/equal_fraction": len(equal) / groups,
    }
    collected = assign_credit(run, phase, made, judged)
    return replace(collected, metrics={**collected.metrics, **own, **metrics})


def rows_to_sample(
    phase: Phase, groups: Int[Tensor, " n"], *, rank: int, world: int
) -> tuple[Int[Tensor, " r"], Int[Tensor, " w"]]:
    """Return the rows (r,) that this rank samples, and the positions (w,) in them of the rows that belong to ``groups``.

    The other rows are fillers: every rank samples the same number of rows, because all ranks must call the policy equally often.
    Its weights may be sharded, and engines check their answers on all ranks at once.
    """
    wanted = torch.isin(phase.group[phase.order], groups).view(world, -1)
    count = int(wanted.sum(dim=1).max())
    rows = (~wanted[rank]).int().argsort(stable=True)[:count].sort().values
    return rows, wanted[rank][rows].nonzero().flatten()


def with_tasks(batch: Batch, tasks: Sequence[Task], *, groups: int, turn: int) -> Batch:
    """Return the same rows with other tasks (``tasks[k]`` for group k of the step) and with the group ids of round ``turn``."""
    places = [number % groups for number in batch.group_ids]
    numbers = tuple(place + turn * groups for place in places)
    return replace(batch, tasks=tuple(tasks[place] for place in places), group_ids=numbers)


def replace_rows(
    made: PendingRollout,
    judged: ScoredBatch,
    rows: Int[Tensor, " w"],
    *,
    new: PendingRollout,
    scores: ScoredBatch,
    taken: Int[Tensor, " w"],
) -> tuple[PendingRollout, ScoredBatch]:
    """Return ``made`` and ``judged`` with row ``rows[k]`` replaced by row ``taken[k]`` of ``new`` and ``scores``."""
    origin = torch.arange(len(made.batch))
    origin[rows] = len(made.batch) + taken
    trajectory = type(made.trajectory).concat([made.trajectory, new.trajectory]).take(origin.to(made.trajectory.mask.device))
    both = [*made.images, *new.images]
    images = [both[row] for row in origin.tolist()]
    joined = ScoredBatch.concat([judged, scores])
    kept = ScoredBatch(
        {name: column[origin] for name, column in joined.scores.items()},
        joined.rewards[origin],
        sum(image is None for image in images),
    )
    tasks, ids = list(made.batch.tasks), list(made.batch.group_ids)
    for row, source in zip(rows.tolist(), taken.tolist(), strict=True):
        replaced, by = made.batch.group[row], new.batch.group[source]
        tasks[replaced], ids[replaced] = new.batch.tasks[by], new.batch.group_ids[by]
    batch = replace(made.batch, tasks=tuple(tasks), group_ids=tuple(ids))
    return replace(made, batch=batch, trajectory=trajectory, images=images), kept
