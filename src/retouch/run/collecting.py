"""Other ways to collect the samples of a step: ahead of it with older weights (``rollout.staleness``), or with further tasks in
place of groups whose samples all have the same reward (``rollout.refill``).

Random draws are keyed by the step and the round, so a resumed run makes the same samples again and reads their scores from the
ledger.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from retouch.core.advantages import equal_groups
from retouch.core.surrogates import importance_weights
from retouch.policies.weights import stale_copies
from retouch.rewards.judging import ScoredBatch
from retouch.run.step import (
    PendingRollout,
    Phase,
    Run,
    ScoredRollout,
    begin_collecting,
    compute_advantages,
    in_global_order,
    wait_for_rewards,
    with_advantages,
)
from retouch.types import Needs, Task


def collect_ahead(run: Run, phase: Phase, start: int, *, staleness: int, truncate_at: float) -> Iterator[ScoredRollout]:
    """Yield the training data of each step of the phase from ``start`` on. The caller updates before it asks for the next step.

    Before the update of a step, the rollouts of up to ``staleness`` later steps have been made, and their rewards are being
    computed. The rollout of step r is made under the weights with which step max(first step of the phase, r - staleness) began.
    These weights are kept as copies and saved in checkpoints. ``truncate_at``: the largest importance weight, see
    ``under_current_weights``.

    Source: rollouts for asynchronous training (AReaL, arXiv 2505.24298).
    """
    first, stop = phase.steps.start, phase.steps.stop
    copies, names = run.policy.copies, stale_copies(staleness)
    queue: deque[PendingRollout] = deque()
    for step in range(start, stop):
        for coming in range(step + len(queue), min(step + staleness + 1, stop)):
            acting = max(first, coming - staleness)
            with nullcontext() if acting == step else copies.using(names[acting % staleness]):
                queue.append(begin_collecting(run, phase.batch(coming)))
        age = step - max(first, step - staleness)
        made = queue.popleft()
        with run.clock("judge"):
            judged = wait_for_rewards(run.ranks, made.pending)
        collected = under_current_weights(run, with_advantages(run, phase, made, judged), age=age, truncate_at=truncate_at)
        # The snapshot replaces the weights that sampled this step. It is taken after the rewards arrived, because a checkpoint may
        # be saved until then.
        copies.snapshot(names[step % staleness])
        yield collected


def under_current_weights(run: Run, collected: ScoredRollout, *, age: int, truncate_at: float) -> ScoredRollout:
    """Return a stale rollout with the log-probabilities of the current weights, and the importance weights of its actions.

    The ratio of the surrogate is then relative to the current weights: it is 1 before the first update, and the clip range limits
    the change of one step. An importance weight without gradient corrects for the older weights that sampled: the probability under
    the current weights divided by that under the weights that sampled, at most ``truncate_at``. Sources: decoupled PPO (Hilton et
    al. 2021, arXiv 2110.00641); truncated importance sampling (Ionides 2008).

    ``age``: the number of steps since the weights that sampled the rollout. Metrics: ``staleness/steps`` is the age,
    ``staleness/weight`` the mean importance weight, ``staleness/truncated`` the fraction of truncated weights, and ``staleness/kl``
    the mean of log old - log current probability, which estimates the KL divergence of the current policy from the policy that
    sampled.
    """
    if age == 0:
        return replace(collected, metrics={**collected.metrics, "staleness/steps": 0.0})
    trajectory = collected.trajectory
    acting, mask = trajectory.log_probs, trajectory.mask
    current = torch.zeros_like(acting)
    with run.clock("stale"), torch.no_grad():
        for part in run.policy.microbatches(trajectory):
            current[part.rows, part.actions] = run.policy.evaluate(trajectory, part, Needs()).log_probs
        weights = importance_weights(current, acting, mask, cap=truncate_at)
    change = (current - acting)[mask].cpu().double()
    drawn = change.exp()
    sums = [drawn.clamp(max=truncate_at).sum(), (drawn > truncate_at).sum(), -change.sum(), torch.ones_like(drawn).sum()]
    weight, truncated, kl, count = run.ranks.sum(torch.stack([each.double().cpu() for each in sums])).tolist()
    count = max(count, 1.0)
    metrics = {
        "staleness/steps": float(age),
        "staleness/weight": weight / count,
        "staleness/truncated": truncated / count,
        "staleness/kl": kl / count,
    }
    return replace(
        collected,
        trajectory=trajectory.with_log_probs(current),
        importance=weights.to(collected.advantages.device),
        metrics={**collected.metrics, **metrics},
    )


Further = Callable[[int, int], Sequence[Task]]
"""Maps a step and a round (from 1) to the tasks of that round, one for each group of the step."""


def collect_refilled(run: Run, phase: Phase, start: int, *, rounds: int, further: Further) -> Iterator[ScoredRollout]:
    """Yield the training data of each step of the phase from ``start`` on, with other tasks in place of groups of equal rewards.

    A group whose rewards are all equal has the advantage 0, so a step with many such groups learns little. Such groups are sampled
    again with other tasks, in at most ``rounds`` rounds. A new group takes the rows, on the same ranks, of the group that it
    replaces. Groups with fewer than two scores are not replaced, because missing scores say nothing about the task. Source: dynamic
    sampling of DAPO (arXiv 2503.14476), which samples whole batches until enough prompts have unequal rewards.

    The reward metrics describe the step's original tasks, as without refill. ``refill/rounds``: the number of rounds that were
    sampled. ``refill/samples``: the number of samples that were made, over all ranks. ``refill/dropped_fraction``: the fraction of
    all sampled groups that were replaced. ``refill/equal_fraction``: the fraction of groups whose rewards are still all equal.
    """
    groups, world = int(phase.group.max()) + 1, run.ranks.world
    for step in range(start, phase.steps.stop):
        made = begin_collecting(run, phase.batch(step))
        with run.clock("judge"):
            judged = wait_for_rewards(run.ranks, made.pending)
        _, own = compute_advantages(run, phase, judged)
        dropped, samples, turn = 0, len(phase.order), 0
        while len(equal := equal_groups(in_global_order(run, phase, judged.rewards), phase.group)) and turn < rounds:
            turn += 1
            dropped += len(equal)
            # All ranks must call the policy equally often: its weights may be sharded, and engines check their answers on all
            # ranks at once. So a rank with fewer rows to replace samples others too, and drops them.
            replaced = torch.isin(phase.group[phase.order], equal).view(world, -1)
            count = int(replaced.sum(dim=1).max())
            mine = replaced[run.ranks.rank]
            rows = (~mine).int().argsort(stable=True)[:count].sort().values
            wanted = mine[rows].nonzero().flatten()
            samples += len(rows) * world
            again = made.batch.take(rows.tolist())
            places = [number % groups for number in again.group_ids]
            tasks = further(step, turn)
            # The group ids of round k start at k * groups, so every round has its own random draws.
            again = replace(
                again,
                tasks=tuple(tasks[place] for place in places),
                group_ids=tuple(place + turn * groups for place in places),
            )
            new = begin_collecting(run, again)
            with run.clock("judge"):
                scores = wait_for_rewards(run.ranks, new.pending)
            made, judged = replace_rows(made, judged, rows[wanted], new=new, scores=scores, taken=wanted)
        collected = with_advantages(run, phase, made, judged)
        refilled = {
            "refill/rounds": float(turn),
            "refill/samples": float(samples),
            "refill/dropped_fraction": dropped / (groups + dropped),
            "refill/equal_fraction": len(equal) / groups,
        }
        yield replace(collected, metrics={**collected.metrics, **own, **refilled})


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
    kept = replace(
        joined,
        scores={name: column[origin] for name, column in joined.scores.items()},
        rewards=joined.rewards[origin],
        faults=sum(image is None for image in images),
    )
    tasks, ids = list(made.batch.tasks), list(made.batch.group_ids)
    for row, source in zip(rows.tolist(), taken.tolist(), strict=True):
        replaced, by = made.batch.group[row], new.batch.group[source]
        tasks[replaced], ids[replaced] = new.batch.tasks[by], new.batch.group_ids[by]
    batch = replace(made.batch, tasks=tuple(tasks), group_ids=tuple(ids))
    return replace(made, batch=batch, trajectory=trajectory, images=images), kept
