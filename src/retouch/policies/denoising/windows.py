"""Windows: which steps of a denoising chain are actions, as a ``range`` of step numbers. Step 0 has the most noise.

A window depends only on (seed, step), so all ranks have the same window. The last step of a chain is never an action: it has no
density.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retouch.config.kinds import Kinds
from retouch.config.section import Count, Section

WINDOWS = Kinds(
    "window",
    {
        "all": "retouch.policies.denoising.windows:AllSteps",
        "window": "retouch.policies.denoising.windows:RandomWindow",
        "branch": "retouch.policies.denoising.windows:RandomWindow",
        "sliding": "retouch.policies.denoising.windows:SlidingWindow",
    },
    tag="mode",
)
_LAST = "which never trains"


class Window(Section):
    """Base class of all windows, built in or your own. Override ``actions``."""

    branches: ClassVar[bool] = False
    """Whether the samples of a group share the chain up to the window."""

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        """The steps of a chain of ``num_steps`` that are actions in training step ``step``. ValueError if they do not fit."""
        raise NotImplementedError(f"{type(self).__name__} defines no actions")

    @property
    def length(self) -> int | None:
        """The number of actions if it is the same for every chain; None if it depends on ``num_steps``."""
        return None

    def problems(self, *, num_steps: int, key: str) -> Iterator[str]:
        """Yield a line for each setting that does not fit a chain of ``num_steps``, as "key: mistake; what to do"."""
        yield from ()


class AllSteps(Window):
    """All steps but the last one train.

    Source: Flow-GRPO (arXiv 2505.05470).
    """

    mode: Literal["all"] = "all"

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        from retouch.core.windows import all_steps

        return all_steps(num_steps)


class RandomWindow(Window):
    """``window``: consecutive steps train, from a start that is drawn in each training step (Flow-GRPO-Fast, arXiv 2505.05470).
    ``branch``: in addition, the samples of a group share all steps before the window."""

    mode: Literal["window", "branch"] = "window"
    size: Count
    """Number of steps in the window."""
    low: Annotated[int, Field(ge=0)] = 0
    """First step that the window may contain."""
    high: Count | None = None
    """One past the last step that the window may contain; null allows all steps but the last one, which never trains."""

    @property
    def branches(self) -> bool:  # type: ignore[override]
        return self.mode == "branch"

    @property
    def length(self) -> int | None:
        return self.size

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        from retouch.core.random import generator
        from retouch.core.windows import random_window

        high = num_steps - 1 if self.high is None else self.high
        return random_window(num_steps, size=self.size, low=self.low, high=high, generator=generator(seed, "window", step))

    def problems(self, *, num_steps: int, key: str) -> Iterator[str]:
        trainable = num_steps - 1
        end = trainable if self.high is None else self.high
        if end > trainable:
            yield f"{key}.high: {end} includes the last of {num_steps} steps, {_LAST}; use {trainable} or less"
        elif self.size > end - self.low:
            yield f"{key}.size: {self.size} steps do not fit in [{self.low}, {end}); use fewer, or widen the range"


class SlidingWindow(Window):
    """Consecutive steps train, and the window moves towards less noise during training (MixGRPO, arXiv 2507.21802)."""

    mode: Literal["sliding"] = "sliding"
    size: Count
    """Number of steps in the window."""
    every: Count = 10
    """Number of training steps between two moves of the window."""
    stride: Count = 1
    """Number of steps by which the window moves, at most ``size``."""

    @property
    def length(self) -> int | None:
        return self.size

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        from retouch.core.windows import sliding_window

        return sliding_window(num_steps, size=self.size, step=step, every=self.every, stride=self.stride)

    def problems(self, *, num_steps: int, key: str) -> Iterator[str]:
        trainable = num_steps - 1
        if self.size > trainable:
            yield f"{key}.size: a window of {self.size} of {num_steps} steps includes the last, {_LAST}; use {trainable} or less"
        if self.stride > self.size:
            yield f"{key}.stride: {self.stride} would skip steps of a window of {self.size}; use {self.size} or less"
