"""The loop: collect, update, accumulate. One loop for every policy and every objective.

    tasks -> rollout -> render -> judge -> advantages -> losses -> step

Rewards are gathered over ranks before advantages are taken, so a group may span ranks. Every rank makes the same calls in the
same order with equally many rows, and raises the same errors: they are decided on what was gathered.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from PIL.Image import Image
from torch import Tensor

from retouch.core.advantages import zero_std_groups
from retouch.core.weights import Normalise, denominator, loss_weights
from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import Stepper
from retouch.protocols import Objective, Renderer
from retouch.rewards.judging import Judged
from retouch.rewards.quota.quota import BudgetSpent
from retouch.training.crediting import Crediting, each_action
from retouch.types import Batch, Minibatch, Sample, Trajectory

Metrics = dict[str, float]


class TooManyMissing(ValueError):
    """More samples than allowed could not be judged; nothing was learned from this step."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How to collect and what to learn from it.

    ``batch``: this rank's rows of a step; ``order``: the global row numbers of every rank's rows, rank after rank. ``advantage``:
    (rewards, group) of all ranks to what each row is worth; None imitates the tasks' targets instead (no rollout, no judge).
    ``credit``: from that, for this rank's rows, to advantages of actions. ``kinds``: which kinds of action train in a step (see
    ``Kind``); None is all, and others weigh nothing.
    """

    name: str
    steps: range
    objective: Objective
    batch: Callable[[int], Batch]
    order: Int[Tensor, " rows"]
    group: Int[Tensor, " rows"]
    advantage: Callable[[Float[Tensor, " rows"], Int[Tensor, " rows"]], Float[Tensor, " rows"]] | None
    normalise: Normalise
    max_length: int | None
    epochs: int
    minibatches: int
    learning_rate: Callable[[int], float]
    credit: Crediting = each_action
    kinds: Callable[[int], Sequence[int] | None] = lambda step: None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What stays the same from phase to phase.

    ``chunk``: rows sampled, rendered and sent to the judge at once. ``describe``: metrics, over all ranks, of what was done.
    ``written``: each row's text, where the policy writes. ``counted``: columns of whose scores the missing share is a metric.
    """

    policy: Any
    renderer: Renderer
    judge: Callable[[Batch, Sequence[Sample]], "Future[Judged]"]
    stepper: Stepper
    ranks: Ranks
    chunk: int
    max_missing: float
    average: Callable[[int], None]
    clock: Callable[[str], AbstractContextManager[None]]
    describe: Callable[[Trajectory], Metrics] = lambda trajectory: {}
    written: Callable[[Trajectory], Sequence[str | None]] = lambda trajectory: [None] * len(trajectory)
    counted: Sequence[str] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """One step's rows on this rank, judged; ``valid`` where the row was. ``returns``: for a value head, where there is one."""

    batch: Batch
    trajectory: Trajectory
    advantages: Float[Tensor, "b t"]
    valid: Bool[Tensor, " b"]
    metrics: Metrics
    judged: Judged | None = None
    images: Sequence[Image | None] = ()
    returns: Float[Tensor, "b t"] | None = None


def train(run: Run, phase: Phase, *, start: int) -> Iterator[tuple[int, Collected, Metrics]]:
    """Take the phase's steps from ``start`` on, handing out each one after it was learned from."""
    for step in range(max(start, phase.steps.start), phase.steps.stop):
        collected = collect(run, phase, step)
        metrics = update(run, phase, step, collected)
        yield step, collected, {**collected.metrics, **metrics}


def collect(run: Run, phase: Phase, step: int) -> Collected:
    """Act, render, judge and compare; or, for imitation, encode the targets."""
    batch = phase.batch(step)
    if phase.advantage is None:
        with run.clock("encode"):
            trajectory = run.policy.demonstrate(batch)
        ones = torch.ones(trajectory.mask.shape)
        return Collected(batch, trajectory, ones, ones[:, 0].bool(), {})
    parts, images, waiting = [], [], []
    for first in range(0, len(batch), run.chunk):
        chunk = batch.take(slice(first, first + run.chunk))
        with run.clock("rollout"):
            parts.append(run.policy.rollout(chunk))
        tasks = [chunk.tasks[k] for k in chunk.group]
        with run.clock("render"):
            drawn = run.renderer(tasks, parts[-1])
        images += drawn
        waiting.append(run.judge(chunk, [Sample(*made) for made in zip(tasks, drawn, run.written(parts[-1]), strict=True)]))
    with run.clock("judge"):
        judged = awaited(run.ranks, waiting)
    worth, metrics = compare(run, phase, judged)
    trajectory = type(parts[0]).concat(parts)
    credit = phase.credit(worth, trajectory, run.ranks)
    metrics |= {**credit.metrics, **run.describe(trajectory)}
    valid = ~judged.rewards.isnan()
    return Collected(batch, trajectory, credit.advantages, valid, metrics, judged, images, credit.returns)


def awaited(ranks: Ranks, waiting: Sequence["Future[Judged]"]) -> Judged:
    """What the judge said of all chunks, in one. BudgetSpent on every rank where it is on one."""
    return Judged.concat(answers(ranks, waiting))


def answers(ranks: Ranks, waiting: Sequence["Future[Judged]"]) -> list[Judged]:
    """What the judge said of each chunk; a rank may have none. BudgetSpent on every rank where it is on one."""
    parts, spent = [], None
    for future in waiting:
        try:
            parts.append(future.result())
        except BudgetSpent as error:
            spent = error
    if ranks.any(spent is not None):
        raise spent or BudgetSpent("the judge's budget is spent, as another rank's log says")
    return parts


def compare(run: Run, phase: Phase, judged: Judged) -> tuple[Float[Tensor, " b"], Metrics]:
    """What this rank's rows are worth beside those of all, and the scores' averages. TooManyMissing above the allowed share."""
    assert phase.advantage is not None
    names = list(judged.scores)
    table = torch.stack([judged.rewards, *(judged.scores[name] for name in names)], dim=1)
    gathered = torch.empty(len(phase.order), table.shape[1])
    gathered[phase.order] = run.ranks.gather(table)
    rewards = gathered[:, 0]
    missing = rewards.isnan().double().mean().item()  # in fp32 exactly the allowed share would be above it
    if missing > run.max_missing:
        raise TooManyMissing(
            f"{missing:.0%} of the samples could not be judged, and the recipe allows {run.max_missing:.0%} (reward.max_missing): "
            "the judge is failing. Nothing was learned from them; start the run again when it answers"
        )
    worth = phase.advantage(rewards, phase.group)
    valid = rewards[~rewards.isnan()]
    metrics = {
        "reward/mean": valid.mean().item(),
        "reward/std": valid.std(correction=0).item(),
        "reward/count": float(len(valid)),
        "reward/missing_fraction": missing,
        "reward/fault_fraction": run.ranks.sum(torch.tensor(float(judged.faults))).item() / len(rewards),
        "group/zero_std_fraction": zero_std_groups(rewards, phase.group),
    }
    for name, column in zip(names, gathered[:, 1:].unbind(dim=1), strict=True):
        metrics[f"reward/{name}"] = column.nanmean().item()
        if name in run.counted:
            metrics[f"missing/{name}"] = column.isnan().double().mean().item()
    mine = phase.order.view(run.ranks.world, -1)[run.ranks.rank]
    return worth[mine], metrics


def update(run: Run, phase: Phase, step: int, collected: Collected) -> Metrics:
    """Learn from what was collected: ``epochs`` passes over ``minibatches`` parts, one optimizer step each."""
    rows = len(collected.batch) // phase.minibatches
    taken = (step - phase.steps.start) * phase.epochs * phase.minibatches
    metrics: Metrics = {}
    for epoch in range(phase.epochs):
        for part in range(phase.minibatches):
            minibatch = cut(run, phase, collected, slice(part * rows, (part + 1) * rows), epoch)
            with run.clock("update"):
                sums, maxima = accumulate(run, phase.objective, minibatch)
                sums["policy/grad_norm"] = run.stepper.step(phase.learning_rate(step))
                taken += 1
                phase.objective.after_step(run.policy, taken)
                run.average(taken)
            if "policy/ratio_max" in maxima and not metrics:
                metrics["policy/ratio_max_first"] = maxima["policy/ratio_max"]
            for name, value in maxima.items():
                metrics[name] = max(value, metrics.get(name, value))
            for name, value in sums.items():
                metrics[name] = metrics.get(name, 0.0) + value / (phase.epochs * phase.minibatches)
    return {**metrics, "policy/learning_rate": phase.learning_rate(step)}


def cut(run: Run, phase: Phase, collected: Collected, rows: slice, epoch: int) -> Minibatch:
    """The rows as a minibatch, weighted so that the loss does not depend on how many ranks share it."""
    trajectory = collected.trajectory.take(rows)
    mask, valid = trajectory.mask.cpu(), collected.valid[rows]
    if (kinds := phase.kinds(collected.batch.step)) is not None:
        mask = mask & torch.isin(trajectory.kind.cpu(), torch.tensor(kinds))
    total = run.ranks.sum(denominator(mask, valid, normalise=phase.normalise, max_length=phase.max_length))
    weights = loss_weights(mask, valid, normalise=phase.normalise, max_length=phase.max_length, total=total)
    device = trajectory.mask.device
    advantages = collected.advantages[rows].to(device)
    returns = None if collected.returns is None else collected.returns[rows].to(device)
    return Minibatch(collected.batch.take(rows), trajectory, advantages, weights.to(device), epoch, returns)


def accumulate(run: Run, objective: Objective, minibatch: Minibatch) -> tuple[Metrics, Metrics]:
    """Backward through every microbatch; the metrics' sums and maxima over microbatches and ranks."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for loss in objective.losses(run.policy, minibatch):
        run.stepper.backward(loss.value)
        for name, value in loss.sums.items():
            sums[name] = sums.get(name, 0.0) + torch.as_tensor(value)
        for name, value in loss.maxima.items():
            maxima[name] = torch.maximum(maxima.get(name, torch.as_tensor(value)), torch.as_tensor(value))
    totals = run.ranks.sum(torch.stack([value.double() for value in sums.values()])).tolist() if sums else []
    highest = run.ranks.max(torch.stack([value.double() for value in maxima.values()])).tolist() if maxima else []
    return dict(zip(sums, totals, strict=True)), dict(zip(maxima, highest, strict=True))
