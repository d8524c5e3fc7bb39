"""Learning rate over a phase: a pure function of the step, so that there is nothing to save."""

import math
from collections.abc import Callable

from retouch.recipe.learning import Optimizer


def learning_rate(optimizer: Optimizer, *, peak: float, steps: range) -> Callable[[int], float]:
    """Linear warm-up to ``peak``, then constant, or down to 0 at the phase's end along a cosine or a line."""

    def at(step: int) -> float:
        done = step - steps.start
        if done < optimizer.warmup_steps:
            return peak * (done + 1) / optimizer.warmup_steps
        gone = (done - optimizer.warmup_steps) / max(1, len(steps) - optimizer.warmup_steps)
        match optimizer.schedule:
            case "constant":
                return peak
            case "cosine":
                return peak * 0.5 * (1 + math.cos(math.pi * gone))
            case "linear":
                return peak * (1 - gone)

    return at
