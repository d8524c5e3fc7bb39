"""Training a base writer by the project's own supervised objective, to write the completions that its tasks bring along."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from retouch.bases.joint import cosine, each_alone
from retouch.loop import Phase, Run, train
from retouch.objectives.cross_entropy import CrossEntropy
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.decoding import Decoding
from retouch.policies.weights import WeightCopies
from retouch.runs.clock import Clock
from retouch.runs.ranks import Ranks
from retouch.runs.stepper import ReplicatedStepper
from retouch.types import AutoregressiveModel, Batch, Objective, Task


def imitate(
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
    objective: Objective | None = None,
) -> None:
    """Train all of the writer's weights on ``rows`` tasks a step, in their order.

    ``learning_rate``: the peak, after ``warmup`` steps; from there it falls to 0 as a cosine. ``longest``: most tokens of a
    completion. ``objective``: None is cross-entropy alone. ``log`` takes the lines.
    """
    module = writer.module.requires_grad_(True)
    decoding = Decoding(max_new_tokens=longest)
    run = Run(
        policy=AutoregressivePolicy(writer, decoding=decoding, microbatch=rows, copies=WeightCopies(module)),
        renderer=_no_renderer,
        judge=_no_judge,
        stepper=ReplicatedStepper(module, Ranks(), betas=(0.9, 0.98), weight_decay=0.01),
        ranks=Ranks(),
        chunk=rows,
        max_missing=0.0,
        average=lambda taken: None,
        clock=Clock(),
    )
    phase = Phase(
        name="supervised",
        steps=range(steps),
        objective=CrossEntropy() if objective is None else objective,
        batch=lambda step: each_alone(tasks[step * rows : (step + 1) * rows], seed=seed, step=step),
        order=torch.arange(rows),
        group=torch.arange(rows),
        advantage=None,
        normalise="token",
        max_length=None,
        epochs=1,
        minibatches=1,
        learning_rate=lambda step: cosine(learning_rate, step, warmup=warmup, steps=steps),
    )
    for step, _, metrics in train(run, phase, start=0):
        if step % 50 == 0 or step == steps - 1:
            told = [f"{name} {metrics[f'policy/{name}']:.4f}" for name in ("loss", "distance") if f"policy/{name}" in metrics]
            log("  ".join([f"step {step}/{steps}", *told]))
    module.requires_grad_(False).eval()


def _no_judge(batch: Batch, samples: Sequence[Any]) -> Any:
    raise AssertionError("imitation asks no judge")


def _no_renderer(tasks: Sequence[Task], trajectory: Any) -> Any:
    raise AssertionError("imitation makes no pictures")
