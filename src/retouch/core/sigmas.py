"""Schedules of sigma, to the bit those of diffusers' FlowMatchEulerDiscreteScheduler: (num_steps + 1,) fp32, from about 1 to 0.

A schedule is a grid, shifted towards noise, perhaps stretched so that its last step ends where ``shift_terminal`` says, and a 0.
``grid`` "train": from the largest to the smallest sigma of the training schedule, as the scheduler makes it when it is told
only the number of steps (SD3). "steps": from 1 to 1 / num_steps, which the pipelines of Flux and Qwen-Image pass in.
"""

import math
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

Grid: TypeAlias = Literal["train", "steps"]
_Sigmas: TypeAlias = "npt.NDArray[np.floating[Any]]"

TRAIN_STEPS = 1000  # of every published flow-matching model that diffusers loads


def static(
    num_steps: int, shift: float, *, grid: Grid = "train", shift_terminal: float | None = None
) -> Float[Tensor, " num_steps_plus_1"]:
    """sigma -> shift sigma / (1 + (shift - 1) sigma) (SD3, arXiv 2403.03206). ``shift`` 1 leaves the grid as it is.

    On the grid "train" the smallest sigma is shifted already, and so twice in the end: that is what diffusers does.
    ValueError: no steps, or a shift that is not above 0.
    """
    if not shift > 0:
        raise ValueError(f"shift {shift}: must be above 0 (1 for no shift)")
    trained = np.array([TRAIN_STEPS, 1], dtype=np.float32) / TRAIN_STEPS
    sigmas = _grid(grid, num_steps, ends=_shift(trained, shift))
    return _finish(_shift(sigmas, shift), shift_terminal)


def dynamic(
    num_steps: int,
    mu: float,
    kind: Literal["exponential", "linear"] = "exponential",
    *,
    grid: Grid = "steps",
    shift_terminal: float | None = None,
) -> Float[Tensor, " num_steps_plus_1"]:
    """sigma -> m / (m + 1 / sigma - 1) with m = exp(mu), or m = mu for "linear": a shift that depends on the image's size.

    ``mu`` comes from ``calculate_shift``. ValueError: no steps, an unknown kind, or a linear ``mu`` that is not above 0.
    """
    if kind not in ("exponential", "linear"):
        raise ValueError(f"kind {kind!r}: choose 'exponential' or 'linear'")
    if kind == "linear" and not mu > 0:
        raise ValueError(f"mu {mu} with kind 'linear': must be above 0")
    m = math.exp(mu) if kind == "exponential" else mu
    trained = np.array([TRAIN_STEPS, 1], dtype=np.float32) / TRAIN_STEPS
    sigmas = _grid(grid, num_steps, ends=trained)
    return _finish(m / (m + (1 / sigmas - 1)), shift_terminal)


def calculate_shift(
    image_seq_len: int,
    *,
    base_seq_len: int = 256,
    max_seq_len: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """``mu`` for an image of so many latent tokens: on the line through (base_seq_len, base_shift) and (max_seq_len, max_shift).

    The defaults are Flux's; a model's scheduler config holds its own (Qwen-Image: max_seq_len 8192, max_shift 0.9).
    """
    slope = (max_shift - base_shift) / (max_seq_len - base_seq_len)
    return image_seq_len * slope + (base_shift - slope * base_seq_len)


def _grid(grid: str, num_steps: int, *, ends: _Sigmas) -> _Sigmas:
    if num_steps < 1:
        raise ValueError(f"num_steps {num_steps}: give at least 1")
    if grid == "steps":
        return np.linspace(1.0, 1 / num_steps, num_steps).astype(np.float32)
    if grid == "train":
        first, last = (float(end) * TRAIN_STEPS for end in ends)
        return np.linspace(first, last, num_steps) / TRAIN_STEPS
    raise ValueError(f"grid {grid!r}: choose 'train' or 'steps'")


def _shift(sigmas: _Sigmas, shift: float) -> _Sigmas:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _finish(sigmas: _Sigmas, shift_terminal: float | None) -> Tensor:
    """Stretched linearly so that 1 stays and the last becomes ``shift_terminal``; then the final 0."""
    if shift_terminal is not None:
        if not 0 < shift_terminal < 1:
            raise ValueError(f"shift_terminal {shift_terminal}: must be between 0 and 1, or None")
        if len(sigmas) < 2:
            raise ValueError("shift_terminal with one step: the last sigma is the first, 1; give at least 2 steps")
        from_noise = 1 - sigmas
        sigmas = 1 - from_noise / (from_noise[-1] / (1 - shift_terminal))
    return torch.cat([torch.from_numpy(sigmas).to(torch.float32), torch.zeros(1)])
