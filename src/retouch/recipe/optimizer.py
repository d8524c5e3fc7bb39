"""The optimizer and its learning rate over time."""

import math
import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainSerializer

from retouch.config.section import NonNegative, Positive, Section, Share


def _steps_or_share(value: float) -> int | float:
    """A number of steps as int, so that recipes contain 5 and not 5.0. Raises ValueError for a fraction above 1."""
    if value == int(value):
        return int(value)
    if value > 1:
        raise ValueError("give a whole number of steps, or a share of the phase's steps below 1")
    return value


class Optimizer(Section):
    """AdamW and its learning rate over time.

    Source: AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101).
    """

    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """Decay of the running means of the gradient and of the squared gradient."""
    eps: Positive = 1e-8
    """Added to the square root of the running mean of the squared gradient."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Positive | None = 1.0
    """Gradients with a larger norm are scaled down to it; null does not clip."""
    moments: Literal["8bit", "cpu"] | None = Field(default=None, exclude_if=operator.not_)
    """How AdamW's two moments are stored: null is fp32 on the device, 8 bytes per trained weight; ``8bit`` takes 2 (arXiv
    2110.02861), for runs without ``sharding``; ``cpu`` keeps fp32 in CPU memory, with ``fsdp2`` or without sharding."""
    fused: Literal["always", "never"] | None = Field(default=None, exclude_if=operator.not_)
    """Whether one kernel updates all weights. This needs fewer kernels and no temporary copies of weights, and gives the same
    weights up to rounding. Null fuses on accelerators, but not on the CPU. Moments in 8 bits or in CPU memory are never fused."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up; cosine and linear end at ``final_share`` of the phase's learning rate."""
    final_share: Share = Field(default=0.0, exclude_if=operator.not_)
    """Learning rate at the end of cosine and linear, as a share of the phase's learning rate."""
    warmup_steps: Annotated[float, Field(ge=0), AfterValidator(_steps_or_share), PlainSerializer(_steps_or_share)] = 0
    """Steps over which the learning rate rises from 0: a whole number, or a share of the phase's steps below 1, rounded up. If a
    run is extended, the share is taken of the new number of steps."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a stepper."""
        found = self.model_dump(include={"betas", "eps", "weight_decay", "max_grad_norm"})
        if self.fused:
            found["fused"] = self.fused == "always"
        return {**found, "moments": self.moments} if self.moments else found

    def warmup_of(self, steps: int) -> int:
        """The number of warm-up steps of a phase with this number of steps; a share is rounded up."""
        share = round(self.warmup_steps * steps, 6)  # 0.07 * 100 is 7.000000000000001
        return math.ceil(share) if self.warmup_steps < 1 else int(self.warmup_steps)

    def learning_rate(self, *, peak: float, steps: range) -> Callable[[int], float]:
        """The learning rate of each step of a phase that takes ``steps``: a linear warm-up to ``peak``, then the schedule. It is a
        pure function of the step, so checkpoints contain no state of it."""
        warmup = self.warmup_of(len(steps))

        def at(step: int) -> float:
            done = step - steps.start
            if done < warmup:
                return peak * (done + 1) / warmup
            progress = (done - warmup) / max(1, len(steps) - warmup)
            match self.schedule:
                case "constant":
                    return peak
                case "cosine":
                    left = 0.5 * (1 + math.cos(math.pi * progress))
                case "linear":
                    left = 1 - progress
            return peak * (self.final_share + (1 - self.final_share) * left)

        return at
