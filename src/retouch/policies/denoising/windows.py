"""Which steps of a denoising chain are actions: drawn from (seed, step), so that every rank draws the same."""

from dataclasses import dataclass
from typing import Literal

from retouch.core.random import generator
from retouch.core.windows import all_steps, random_window, sliding_window


@dataclass(frozen=True, kw_only=True)
class Window:
    """``all``: every step but the last. ``window``: ``size`` steps from a random start in [low, high - size] (Flow-GRPO-Fast).
    ``sliding``: ``size`` steps that move on by ``stride`` every ``every`` training steps (MixGRPO). ``branch``: like
    ``window``, and the samples of a group share everything before it.
    """

    mode: Literal["all", "window", "sliding", "branch"] = "all"
    size: int = 2
    low: int = 0
    high: int | None = None
    every: int = 10
    stride: int = 1

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        """The steps of this training step's chain that explore. ValueError where the window does not fit ``num_steps``."""
        if self.mode == "all":
            return all_steps(num_steps)
        if self.mode == "sliding":
            return sliding_window(num_steps, size=self.size, step=step, every=self.every, stride=self.stride)
        high = num_steps - 1 if self.high is None else self.high
        return random_window(num_steps, size=self.size, low=self.low, high=high, generator=generator(seed, "window", step))
