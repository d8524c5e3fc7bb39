"""Supervised training of the base models with the library's own training loop and objectives."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from retouch.core.weights import Normalise
from retouch.distributed.ranks import Ranks
from retouch.distributed.stepper import ReplicatedStepper
from retouch.objectives.imitation import CrossEntropy
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, SupportsLosses
from retouch.run.clock import Clock
from retouch.run.step import Phase, Run, train
from retouch.types import Batch, Task


def train_on_demonstrations(
    policy: Any,
    batch: Callable[[int], Batch],
    *,
    objective: SupportsLosses,
    normalise: Normalise,
    rows: int,
    steps: int,
    learning_rate: float,
    warmup: int,
    second_beta: float,
    log: Callable[[str], None],
    average: Callable[[int], None] = lambda taken: None,
) -> None:
    """Train all weights of the policy on ``steps`` batches of ``rows`` tasks.

    ``learning_rate``: the peak, which is reached after ``warmup`` steps; the learning rate then falls to 0 along a cosine.
    ``second_beta``: the second beta of AdamW. ``average``: called after each step with the number of steps so far. ``log``: called
    with each line of progress."""
    ranks = Ranks()
    run = Run(
        policy=policy,
        renderer=_no_renderer,
        judge=_no_judge,
        stepper=ReplicatedStepper(policy.module, ranks, betas=(0.9, second_beta), weight_decay=0.01),
        ranks=ranks,
        chunk=rows,
        max_missing=0.0,
        average=average,
        clock=Clock(),
    )
    phase = Phase(
        name="supervised",
        steps=range(steps),
        objective=objective,
        batch=batch,
        order=torch.arange(rows),
        group=torch.arange(rows),
        advantage=None,
        normalise=normalise,
        max_length=None,
        epochs=1,
        minibatches=1,
        learning_rate=lambda step: warmup_cosine(learning_rate, step, warmup=warmup, steps=steps),
    )
    for step, _, metrics in train(run, phase, start=0):
        if step % 50 == 0 or step == steps - 1:
            values = [f"{name} {metrics[f'policy/{name}']:.4f}" for name in ("loss", "distance") if f"policy/{name}" in metrics]
            log("  ".join([f"step {step}/{steps}", *values]))


def train_on_completions(
    writer: AutoregressiveModel,
    tasks: Sequence[Task],
    *,
    rows: int,
    steps: int,
    learning_rate: float,
    warmup: int,
    longest: int,
    seed: int,
    log: Callable[[str], None],
    objective: SupportsLosses | None = None,
) -> None:
    """Train all weights of the writer on ``rows`` tasks per step, in the order of the tasks.

    ``learning_rate``: the peak, which is reached after ``warmup`` steps; the learning rate then falls to 0 along a cosine.
    ``longest``: the largest number of tokens of a completion. ``objective``: None uses cross-entropy. ``log``: called with each
    line of progress.
    """
    module = writer.module.requires_grad_(True)
    sampling = TokenRollout(max_new_tokens=longest)
    train_on_demonstrations(
        AutoregressivePolicy(writer, sampling=sampling, microbatch=rows, copies=WeightCopies(module)),
        lambda step: ungrouped_batch(tasks[step * rows : (step + 1) * rows], seed=seed, step=step),
        objective=CrossEntropy() if objective is None else objective,
        normalise="token",
        rows=rows,
        steps=steps,
        learning_rate=learning_rate,
        warmup=warmup,
        second_beta=0.98,
        log=log,
    )
    module.requires_grad_(False).eval()


def ungrouped_batch(tasks: Sequence[Task], *, seed: int, step: int) -> Batch:
    """A batch in which every task is a group of one sample."""
    ids = tuple(range(len(tasks)))
    return Batch(seed=seed, step=step, tasks=tuple(tasks), group_ids=ids, group=ids, slot=(0,) * len(tasks))


def warmup_cosine(peak: float, step: int, *, warmup: int, steps: int) -> float:
    """The learning rate of a step: a linear rise to the peak in ``warmup`` steps, times a cosine that falls to 0 at ``steps``."""
    return peak * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _no_judge(batch: Batch, samples: Sequence[Any]) -> Any:
    raise AssertionError("supervised training uses no reward")


def _no_renderer(tasks: Sequence[Task], trajectory: Any) -> Any:
    raise AssertionError("supervised training renders no images")
