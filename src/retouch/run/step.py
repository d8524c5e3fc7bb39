"""A training step, from the tasks to the optimizer, for every policy and every objective.

    collect:  1 tasks -> 2 rollout -> 3 render -> 4 rewards -> 5 gather -> 6 advantages
    update:   7 minibatch -> 8 loss weights -> 9 losses and backward -> 10 optimizer step

For GRPO, the formulas of stations 6 and 9 are in ``core/advantages.py`` (``group_relative``) and ``objectives/policy_gradient.py``.
Every rank makes the same calls in the same order with equally many rows, and raises the same errors, because they depend only on
gathered values.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from PIL.Image import Image
from torch import Tensor

from retouch.core.advantages import zero_std_groups
from retouch.core.intervals import estimate_mean
from retouch.core.surrogates import loss_weights
from retouch.distributed.optimizer import Stepper
from retouch.distributed.ranks import Ranks
from retouch.models.parts import to_device
from retouch.objectives.advantages import Advantage
from retouch.objectives.base import Objective
from retouch.protocols import Renderer
from retouch.rewards.base import BudgetSpent
from retouch.rewards.judging import ScoredBatch
from retouch.run.metrics import completion_metrics, completion_texts
from retouch.types import Batch, Minibatch, Sample, Trajectory

Metrics = dict[str, float]

STOP_SECONDS = 10.0
"""How long a run that was asked to stop waits for rewards."""
_POLL_SECONDS = 0.25
_log = logging.getLogger("retouch")


class RewardsAbandoned(Exception):
    """The run was asked to stop, and the rewards did not arrive within ``STOP_SECONDS``. The step made no update."""


class TooManyMissing(ValueError):
    """More samples than allowed have no reward. The step made no update."""


class RewardFailed(ValueError):
    """The reward raised ValueError on a rank; the message is that of the error. The samples have no scores."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How to collect samples and what to learn from them.

    ``batch``: maps a step to this rank's rows. ``order``: the global row numbers of the rows of all ranks, in the order of ranks.
    ``group``: the group of each global row. ``advantage``: None for an objective that imitates the tasks' targets (no rollout, no
    reward). ``reward_range``: the smallest and the largest possible reward. ``max_length``: the largest number of actions of a
    row, for loss weights "dr_grpo". ``source``: yields the training data of each step, from a given step on (``collecting.py``);
    None: collect one step after the other. ``trains``: whether the policy trains in a step.
    """

    name: str
    steps: range
    objective: Objective
    batch: Callable[[int], Batch]
    order: Int[Tensor, " rows"]
    group: Int[Tensor, " rows"]
    advantage: Advantage | None
    reward_range: tuple[float, float] = (0.0, 1.0)
    max_length: int | None = None
    epochs: int
    minibatches: int
    learning_rate: Callable[[int], float]
    source: "Callable[[Run, Phase, int], Iterator[ScoredRollout]] | None" = None
    trains: Callable[[int], bool] = lambda step: True


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run that are the same in all phases.

    ``judge``: starts scoring a chunk's samples and returns at once. ``chunk``: the number of rows that are sampled, rendered and
    scored together. ``max_missing``: the largest allowed fraction of samples without a reward. ``average``: updates the weight
    average; called with the number of optimizer steps in the phase. ``clock``: times a named stage. ``counted``: the columns whose
    fraction of missing scores is logged. ``painting``: the image model, if it makes the images with exploration and trains too;
    None: ``renderer`` makes them. ``episodes``: begins to collect rows that are edited in several turns; None: in one.
    """

    policy: Any
    renderer: Renderer
    judge: Callable[[Batch, Sequence[Sample]], "Future[ScoredBatch]"]
    stepper: Stepper
    ranks: Ranks
    chunk: int
    max_missing: float
    average: Callable[[int], None]
    clock: Callable[[str], AbstractContextManager[None]]
    counted: Sequence[str] = ()
    painting: Any = None  # ``retouch.run.painting.Painting``, which imports this module
    episodes: "Callable[[Run, Batch], PendingRollout] | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRollout:
    """This rank's rows of a step with their advantages. ``valid``: whether the row has a reward. ``returns``: the targets of a
    value head. ``importance``: the importance weights of actions that were sampled with older weights. ``painted``: the same rows
    with the trajectory of the image model, if it trains too."""

    batch: Batch
    trajectory: Trajectory
    advantages: Float[Tensor, "b t"]
    valid: Bool[Tensor, " b"]
    metrics: Metrics
    judged: ScoredBatch | None = None
    images: Sequence[Image | None] = ()
    returns: Float[Tensor, "b t"] | None = None
    importance: Float[Tensor, "b t"] | None = None
    painted: "ScoredRollout | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class PendingRollout:
    """The samples of a step while their rewards are being computed. ``pending``: the future scores, one for each chunk.
    ``painted``: the rows and the trajectory of the image model, if it trains too. ``credit``: maps the scores of the samples to
    those of the rows, if there are more samples than rows."""

    batch: Batch
    trajectory: Trajectory
    images: Sequence[Image | None]
    pending: "Sequence[Future[ScoredBatch]]"
    painted: "tuple[Batch, Trajectory] | None" = None
    credit: Callable[[ScoredBatch], ScoredBatch] = lambda judged: judged


def train(run: Run, phase: Phase, *, start: int) -> Iterator[tuple[int, ScoredRollout, Metrics]]:
    """Train the phase's steps from ``start`` on; yields (step, collected samples, metrics) after each step."""
    steps = range(max(start, phase.steps.start), phase.steps.stop)
    every = (collect(run, phase, step) for step in steps) if phase.source is None else phase.source(run, phase, steps.start)
    for step, collected in zip(steps, every, strict=True):
        metrics = dict(collected.metrics)
        if phase.trains(step):
            metrics |= update(run, phase, step, collected)
        if run.painting is not None and run.painting.phase.trains(step) and collected.painted is not None:
            metrics |= run.painting.train(step, collected.painted)
        yield step, collected, metrics


def collect(run: Run, phase: Phase, step: int) -> ScoredRollout:
    """Sample, render, score and compute advantages; for an imitation objective, encode the targets of the tasks instead."""
    batch = phase.batch(step)  # 1. This rank's rows: ``group_size`` rows, with keys of their own for noise, of each task.
    if phase.advantage is None:
        with run.clock("encode"):
            parts = [phase.objective.demonstrate(run.policy, chunk) for chunk in chunks_of(batch, run.chunk)]
        trajectory = type(parts[0]).concat(parts)
        ones = torch.ones(trajectory.mask.shape)
        return ScoredRollout(batch, trajectory, ones, ones[:, 0].bool(), {})
    made = begin_collecting(run, batch)
    with run.clock("judge"):
        judged = wait_for_rewards(run.ranks, made.pending)
    return with_advantages(run, phase, made, judged)


def chunks_of(batch: Batch, rows: int) -> list[Batch]:
    return [batch.take(slice(first, first + rows)) for first in range(0, len(batch), rows)]


def begin_collecting(run: Run, batch: Batch) -> PendingRollout:
    """Sample and render these rows, and start scoring them: a chunk is judged while the next one is sampled."""
    if run.episodes is not None:
        return run.episodes(run, batch)
    parts, images, pending, painted = [], [], [], []
    for chunk in chunks_of(batch, run.chunk):
        with run.clock("rollout"):  # 2. Actions and their log-probabilities under the weights that sample, without gradient.
            parts.append(run.policy.rollout(chunk))
        tasks = [chunk.tasks[k] for k in chunk.group]
        with run.clock("render"):  # 3. Row i of every tensor and list is sample i; an output without an image is None.
            if run.painting is None:
                rendered = run.renderer(tasks, parts[-1])
            else:
                rows, made, rendered = run.painting.paint(chunk, parts[-1].outputs)
                painted.append((rows, made))
        images += rendered
        samples = [Sample(*each) for each in zip(tasks, rendered, completion_texts(parts[-1]), strict=True)]
        pending.append(run.judge(chunk, samples))  # 4. Returns at once; the rewards are NaN where there is no score.
    both = None if run.painting is None else run.painting.joined(painted)
    return PendingRollout(batch, type(parts[0]).concat(parts), images, pending, both)


def wait_for_rewards(ranks: Ranks, pending: Sequence["Future[ScoredBatch]"]) -> ScoredBatch:
    """Return the scores of all chunks, in order. Raises the same errors as ``wait_for_chunks``, on every rank."""
    return ScoredBatch.concat(wait_for_chunks(ranks, pending))


def wait_for_chunks(ranks: Ranks, pending: Sequence["Future[ScoredBatch]"]) -> list[ScoredBatch]:
    """Return the scores of each chunk; a rank may have no chunks.

    Raises on every rank: RewardFailed if the reward of one rank raised ValueError, BudgetSpent if the judge of one rank has spent
    its budget, RewardsAbandoned if one rank was asked to stop and its rewards did not arrive within ``STOP_SECONDS``.
    """
    deadline, abandoned = math.inf, False
    while not abandoned and (unfinished := wait(pending, timeout=_POLL_SECONDS).not_done):
        if ranks.stop.is_set() and deadline == math.inf:
            deadline = time.monotonic() + STOP_SECONDS
            _log.info("asked to stop: waiting at most %.0f s for the rewards of %d chunks", STOP_SECONDS, len(unfinished))
        abandoned = time.monotonic() > deadline
    parts: list[ScoredBatch] = []
    failed: ValueError | None = None
    spent: BudgetSpent | None = None
    for future in () if abandoned else pending:
        try:
            parts.append(future.result())
        except BudgetSpent as error:
            spent = error
        except ValueError as error:
            failed = failed or error
    # An error that only one rank raised would leave the others waiting in their next collective call for ever.
    flags = torch.tensor([float(each) for each in (failed is not None, spent is not None, abandoned)])
    any_failed, any_spent, any_abandoned = ranks.max(flags).tolist()
    if any_abandoned:
        raise RewardsAbandoned
    if any_failed:
        raise RewardFailed("the reward failed on another rank, as its log says" if failed is None else str(failed)) from failed
    if any_spent:
        raise spent or BudgetSpent("the judge's budget is spent, as another rank's log says")
    return parts


def with_advantages(run: Run, phase: Phase, made: PendingRollout, judged: ScoredBatch) -> ScoredRollout:
    """Compute the advantages and metrics of rows that are scored. Raises TooManyMissing like ``compute_advantages``."""
    assert phase.advantage is not None
    judged = made.credit(judged)
    row_advantages, metrics = compute_advantages(run, phase, judged)
    credit = phase.advantage.assign(row_advantages, made.trajectory, run.ranks)  # (b,) to (b, t); a value head sees each action
    metrics |= {**credit.metrics, **completion_metrics(made.trajectory, ranks=run.ranks)}
    valid, painted = ~judged.rewards.isnan(), None
    if made.painted is not None:  # the advantage of a sample is that of its completion and of its image
        rows, trajectory = made.painted
        painted = ScoredRollout(rows, trajectory, row_advantages[:, None].expand(trajectory.mask.shape), valid, {})
    return ScoredRollout(
        made.batch, made.trajectory, credit.advantages, valid, metrics, judged, made.images, credit.returns, painted=painted
    )


def compute_advantages(run: Run, phase: Phase, judged: ScoredBatch) -> tuple[Float[Tensor, " b"], Metrics]:
    """Return one advantage per row of this rank, computed from the rewards of all ranks, and metrics of the scores.

    Raises TooManyMissing on every rank if more than the fraction ``run.max_missing`` of the rows has no reward.
    """
    assert phase.advantage is not None
    # 5. Gather before anything is compared, because the rows of a group may be on several ranks. Rewards are fp64.
    names = list(judged.scores)
    exists = torch.ones_like(judged.rewards) if judged.there is None else judged.there.to(judged.rewards)
    gathered = in_global_order(run, phase, torch.stack([exists, judged.rewards, *(judged.scores[name] for name in names)], dim=1))
    kept = gathered[:, 0] > 0
    rewards, group = gathered[kept, 1], phase.group[kept]
    missing = rewards.isnan().double().mean().item()  # in fp32, a fraction that equals the limit could exceed it
    if missing > run.max_missing:
        raise TooManyMissing(
            f"{missing:.0%} of the samples could not be judged, and the recipe allows {run.max_missing:.0%} (reward.max_missing). "
            "Nothing was learned from this step. If the judge is failing, start the run again when it answers; if the reward "
            f"leaves samples out on purpose, set max_missing to the share that it leaves out{judged.last_fault}"
        )
    # 6. GRPO: A = (reward - mean of the group) / (std of the group + eps), clamped if `clip` is set. A missing
    #    reward is in no mean, and its A is 0.
    scores = dict(zip(names, gathered[kept, 2:].unbind(dim=1), strict=True))
    read: dict[str, Any] = {"scores": scores} if phase.advantage.reads_scores else {}
    advantages = torch.zeros(len(phase.order))
    advantages[kept] = phase.advantage(rewards, group, reward_range=phase.reward_range, **read).float()
    valid = rewards[~rewards.isnan()]
    metrics = {
        "reward/mean": valid.mean().item(),
        "reward/std": valid.std(correction=0).item(),
        "reward/count": float(len(valid)),
        "reward/ci95": estimate_mean(rewards.tolist(), [str(number) for number in group.tolist()]).half_width,
        "reward/missing_fraction": missing,
        "reward/fault_fraction": run.ranks.sum(torch.tensor(float(judged.faults))).item() / len(rewards),
        "group/zero_std_fraction": zero_std_groups(rewards, group),
    }
    for name, column in scores.items():
        metrics[f"reward/{name}"] = column.nanmean().item()
        if name in run.counted:
            metrics[f"missing/{name}"] = column.isnan().double().mean().item()
    mine = phase.order.view(run.ranks.world, -1)[run.ranks.rank]
    return advantages[mine], metrics


def in_global_order(run: Run, phase: Phase, values: Tensor) -> Tensor:
    """Gather the rows of all ranks, (b, ...) on each rank, to (rows, ...) in the step's global order."""
    gathered = torch.empty(len(phase.order), *values.shape[1:], dtype=values.dtype)
    gathered[phase.order] = run.ranks.gather(values)
    return gathered


def update(run: Run, phase: Phase, step: int, collected: ScoredRollout) -> Metrics:
    """Train on what was collected: ``epochs`` passes over ``minibatches`` parts, with one optimizer step each."""
    rows = len(collected.batch) // phase.minibatches
    # A model that trains in turn has taken fewer optimizer steps than the run: its averages follow its own.
    taken = sum(map(phase.trains, range(phase.steps.start, step))) * phase.epochs * phase.minibatches
    metrics: Metrics = {}
    for epoch in range(phase.epochs):
        for part in range(phase.minibatches):
            minibatch = make_minibatch(run, phase, collected, slice(part * rows, (part + 1) * rows), epoch)
            if phase.advantage is not None and phase.advantage.weighs:
                minibatch = weighted_rows(run.ranks, minibatch)
            with run.clock("update"):
                sums, maxima = accumulate(run, phase.objective, minibatch)
                # 10. Reduces the gradient over ranks, clips its norm, and refuses to step if it is not finite.
                sums["policy/grad_norm"] = run.stepper.step(phase.learning_rate(step))
                taken += 1
                phase.objective.after_step(run.policy, taken)  # such as DiffusionNFT's old policy, which follows the current one
                run.average(taken)
            if "policy/ratio_max" in maxima and not metrics:
                metrics["policy/ratio_max_first"] = maxima["policy/ratio_max"]  # |ratio - 1| on policy: rounding and nothing else
            for name, value in maxima.items():
                metrics[name] = max(value, metrics.get(name, value))
            for name, value in sums.items():
                metrics[name] = metrics.get(name, 0.0) + value / (phase.epochs * phase.minibatches)
    return {**metrics, "policy/learning_rate": phase.learning_rate(step)}


def make_minibatch(run: Run, phase: Phase, collected: ScoredRollout, rows: slice, epoch: int) -> Minibatch:
    """Return the given rows with loss weights that are normalised over all ranks, so the loss does not depend on their number."""
    # 7. The rows keep the log-probabilities of the rollout: the ratio is relative to the weights that sampled, in every epoch
    #    (with stale samples, to those at the start of the step). All epochs have the same minibatches in the same order.
    trajectory = collected.trajectory.take(rows)
    mask, valid = trajectory.mask.cpu(), collected.valid[rows]
    if (kinds := phase.objective.trained_kinds(collected.batch.step - phase.steps.start)) is not None:
        mask = mask & torch.isin(trajectory.kind.cpu(), torch.tensor(kinds))
    # 8. The loss is the plain sum of weight * loss of an action. GRPO: weight = 1 / (valid rows * actions of the row); "token":
    #    1 / actions of all rows; "dr_grpo": 1 / (valid rows * longest row). The counts are those of all ranks, never of one.
    normalise = phase.objective.loss_weights
    weights = loss_weights(mask, valid, normalise=normalise, max_length=phase.max_length, over_ranks=run.ranks.sum)
    # With the other modes the sum is 1.
    weight_sum = run.ranks.sum(weights.sum()).item() if normalise == "dr_grpo" else 1.0
    device = trajectory.mask.device
    advantages = collected.advantages[rows].masked_fill(~valid[:, None], 0.0)  # NaN times weight 0 would be NaN
    if collected.importance is not None:  # surrogates are proportional to the advantage, so this weights them
        advantages = advantages * collected.importance[rows]
    advantages, weights = (to_device(each, device) for each in (advantages, weights))
    returns = None if collected.returns is None else collected.returns[rows].to(device)
    return Minibatch(collected.batch.take(rows), trajectory, advantages, weights, epoch, returns, weight_sum or 1.0)


def weighted_rows(ranks: Ranks, minibatch: Minibatch) -> Minibatch:
    """Return the rows whose loss weight is not 0 after the advantages were multiplied into the weights. Their advantages become 1.

    Every rank gets the same number of rows, at least one; the surplus rows of a rank have weight 0.
    """
    weights = minibatch.weights * minibatch.advantages
    unused = (weights == 0).all(dim=1).cpu()
    count = max(1, int(ranks.max((~unused).sum().float())))
    rows = unused.int().argsort(stable=True)[:count].sort().values
    there = rows.to(weights.device)
    return Minibatch(
        minibatch.batch.take(rows.tolist()),
        minibatch.trajectory.take(there),
        torch.ones_like(weights[there]),
        weights[there],
        minibatch.epoch,
        None if minibatch.returns is None else minibatch.returns[there],
        minibatch.weight_sum,
    )


def accumulate(run: Run, objective: Objective, minibatch: Minibatch) -> tuple[Metrics, Metrics]:
    """Run backward for every microbatch. Returns the sums and the maxima of the metrics over microbatches and ranks."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    # 9. GRPO: scale * max(-A ratio, -A clip(ratio)) + weight of the KL * KL, ratio = exp(log p now - log p of the rollout). The log
    # p of cps is no density. The scale is 1 without RatioNorm, noise weights and engines.
    for loss in objective.losses(run.policy, minibatch):  # one share per microbatch: its graph is freed before the next forward
        run.stepper.backward(loss.value)
        for name, value in loss.sums.items():
            sums[name] = sums.get(name, 0.0) + torch.as_tensor(value)
        for name, value in loss.maxima.items():
            maxima[name] = torch.maximum(maxima.get(name, torch.as_tensor(value)), torch.as_tensor(value))
    # On the CPU, because MPS has no fp64.
    totals = run.ranks.sum(torch.stack([value.cpu().double() for value in sums.values()])).tolist() if sums else []
    highest = run.ranks.max(torch.stack([value.cpu().double() for value in maxima.values()])).tolist() if maxima else []
    return dict(zip(sums, totals, strict=True)), dict(zip(maxima, highest, strict=True))
