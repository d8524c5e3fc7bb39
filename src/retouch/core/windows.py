"""Windows: the steps of a denoising chain that are actions, as a ``range`` of step numbers. Step 0 is the noisiest.

Steps outside the window are ODE steps. The last step (to sigma 0) is never in a window: under "cps" it has no density, and under
"sde" its standard deviation is almost 0. All ranks must use the same window, so key the generator by (seed, step), not by rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def all_steps(num_steps: int) -> range:
    """All steps except the last. Raises ValueError if ``num_steps`` is below 2."""
    return range(_trainable_steps(num_steps))


def random_window(num_steps: int, size: int, *, low: int, high: int, generator: torch.Generator) -> range:
    """``size`` consecutive steps within [low, high), with a uniformly random start (Flow-GRPO-Fast, arXiv 2505.05470).

    Choose [low, high) in the noisier half of the chain. Raises ValueError, with the legal values, if the window does not fit or
    could contain the last step.
    """
    trainable = _trainable_steps(num_steps)
    if not 0 <= low < high <= trainable:
        raise ValueError(
            f"window range [{low}, {high}) of {num_steps} steps: give 0 <= low < high <= {trainable} (the last step has no density)"
        )
    if not 1 <= size <= high - low:
        raise ValueError(f"window size {size} in the range [{low}, {high}): give 1 to {high - low}")
    import torch

    start = int(torch.randint(low, high - size + 1, (), generator=generator))
    return range(start, start + size)


def sliding_window(num_steps: int, size: int, *, step: int, every: int, stride: int) -> range:
    """``size`` consecutive steps that move ``stride`` towards the end every ``every`` training steps, then return to the start.

    The sliding window of MixGRPO (arXiv 2507.21802). ``step`` is the training step, from 0. The last position ends at the
    second-to-last step of the chain, even if ``stride`` would go past it, so that every step but the last is trained. Raises
    ValueError, with the legal values, if an argument is out of range.
    """
    trainable = _trainable_steps(num_steps)
    if not 1 <= size <= trainable:
        raise ValueError(f"window size {size} of {num_steps} steps: give 1 to {trainable} (the last step has no density)")
    if every < 1 or not 1 <= stride <= size or step < 0:
        raise ValueError(
            f"window at step {step}, every {every}, stride {stride}: give step >= 0, every >= 1 and stride 1 to {size} (the size)"
        )
    furthest = trainable - size
    positions = -(-furthest // stride) + 1
    start = min(step // every % positions * stride, furthest)
    return range(start, start + size)


def _trainable_steps(num_steps: int) -> int:
    if num_steps < 2:
        raise ValueError(f"num_steps {num_steps}: the last step cannot be trained, so give at least 2")
    return num_steps - 1
