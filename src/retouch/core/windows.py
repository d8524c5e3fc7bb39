"""Which steps of a denoising chain are actions: a ``range`` of step numbers, step 0 being the noisiest.

The last step (to sigma 0) is never among them: it has no density under cps and a needle of one under sde. Outside the window a
chain takes ode steps. Every rank must see the same window, so a draw takes a generator keyed by (seed, step), never by rank.
"""

import torch


def all_steps(num_steps: int, *, fraction: float = 1.0) -> range:
    """Every step but the last, or the first ``fraction`` of the chain (Flow-GRPO, arXiv 2505.05470, finds half as good and faster).

    ValueError: where that leaves no step to train.
    """
    usable = _usable(num_steps)
    if not 0 < fraction <= 1 or int(num_steps * fraction) < 1:
        raise ValueError(f"fraction {fraction} of {num_steps} steps leaves none: give at least {1 / num_steps:.3g}, at most 1")
    return range(min(int(num_steps * fraction), usable))


def random_window(num_steps: int, size: int, *, low: int, high: int, generator: torch.Generator) -> range:
    """``size`` steps within [low, high), from a start drawn evenly (Flow-GRPO-Fast; windows belong in the noisy half).

    ValueError: where the window does not fit, or would hold the last step; names the legal values.
    """
    usable = _usable(num_steps)
    if not 0 <= low < high <= usable:
        raise ValueError(
            f"window range [{low}, {high}) of {num_steps} steps: give 0 <= low < high <= {usable} (the last step has no density)"
        )
    if not 1 <= size <= high - low:
        raise ValueError(f"window size {size} in the range [{low}, {high}): give 1 to {high - low}")
    start = int(torch.randint(low, high - size + 1, (), generator=generator))
    return range(start, start + size)


def sliding_window(num_steps: int, size: int, *, step: int, every: int, stride: int) -> range:
    """``size`` steps that move ``stride`` towards the end after ``every`` training steps, and begin anew after the end.

    ``step`` is the training step, from 0. The last place ends at the last but one step of the chain even where ``stride`` would
    pass it, so that every step but the last is trained (MixGRPO, arXiv 2507.21802). ValueError: names the legal values.
    """
    usable = _usable(num_steps)
    if not 1 <= size <= usable:
        raise ValueError(f"window size {size} of {num_steps} steps: give 1 to {usable} (the last step has no density)")
    if every < 1 or not 1 <= stride <= size or step < 0:
        raise ValueError(
            f"window at step {step}, every {every}, stride {stride}: give step >= 0, every >= 1 and stride 1 to {size} (the size)"
        )
    furthest = usable - size
    places = -(-furthest // stride) + 1
    start = min(step // every % places * stride, furthest)
    return range(start, start + size)


def _usable(num_steps: int) -> int:
    if num_steps < 2:
        raise ValueError(f"num_steps {num_steps}: the last step cannot be trained, so give at least 2")
    return num_steps - 1
