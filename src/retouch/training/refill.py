"""Replaces groups of equal rewards with samples of other tasks (``rollout.refill``).

A group whose rewards are all equal has the advantage 0, so a step with many such groups learns little. After the rewards of a step
are known, such groups are sampled again with other tasks, in at most ``rounds`` rounds. A new group takes the rows, on the same
ranks, of the group that it replaces. Groups with fewer than two scores are not replaced, because missing scores say nothing about
the task; ``reward.max_missing`` limits them.

Source: dynamic sampling of DAPO (arXiv 2503.14476), which samples whole batches until enough prompts have unequal rewards.

Tasks and random draws are keyed by the step and the round, and the group ids of round k start at k times ``tasks_per_step``, so a
resumed run makes the same samples and reads their scores from the ledger.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from retouch.core.advantages import equal_groups
from retouch.rewards.judging import ScoredBatch
from retouch.training.loop import (
    PendingRollout,
    Phase,
    Run,
    ScoredRollout,
    assign_credit,
    begin_collecting,
    compute_advantages,
    in_global_order,
    wait_for_rewards,
)
from retouch.types import Batch, Task

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
