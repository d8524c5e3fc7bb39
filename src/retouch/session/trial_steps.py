"""A trial step for every remaining phase, so that a fault in a later phase is found before the first one starts."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from retouch.assembly.assembly import Assembly
from retouch.distributed.stepper import Stepper
from retouch.rewards.judging import ScoredBatch
from retouch.training.preflight import Check, preflight
from retouch.types import Batch, Sample

ROWS = 8


def trial_steps(
    parts: Assembly, *, stepper: Stepper, judge: Callable[[Batch, Sequence[Sample]], "Future[ScoredBatch]"], done: int
) -> Iterator[Check]:
    """The preflight checks of each phase that is not finished after ``done`` steps. Asks no judge and restores every bit."""
    for index, (_, steps) in enumerate(parts.plan):
        if done >= steps.stop or not steps:
            continue
        run, phase = parts.phase(index, stepper=stepper, judge=judge)
        step = max(done, steps.start)
        where = "" if parts.recipe.phases is None else f"phase {phase.name}: "
        for check in preflight(run, phase, step=step, rows=min(ROWS, len(phase.batch(step)))):
            yield replace(check, text=f"{where}{check.text}")
