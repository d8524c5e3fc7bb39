"""Training a base writer by the project's own supervised objective, to write the completions that its tasks bring along."""

from collections.abc import Callable, Sequence

from retouch.objectives.cross_entropy import CrossEntropy
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.pretraining.teaching import each_alone, teach
from retouch.protocols import AutoregressiveModel, SupportsLosses
from retouch.types import Task


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
    objective: SupportsLosses | None = None,
) -> None:
    """Train all of the writer's weights on ``rows`` tasks a step, in their order.

    ``learning_rate``: the peak, after ``warmup`` steps; from there it falls to 0 as a cosine. ``longest``: most tokens of a
    completion. ``objective``: None is cross-entropy alone. ``log`` takes the lines.
    """
    module = writer.module.requires_grad_(True)
    sampling = TokenRollout(max_new_tokens=longest)
    teach(
        AutoregressivePolicy(writer, sampling=sampling, microbatch=rows, copies=WeightCopies(module)),
        lambda step: each_alone(tasks[step * rows : (step + 1) * rows], seed=seed, step=step),
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
