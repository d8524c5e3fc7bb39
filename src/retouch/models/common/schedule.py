"""A diffusers pipeline's own noise schedule, made by its own scheduler from its own configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from torch import Tensor


def dynamic_shift(config: Mapping[str, Any], image_tokens: int) -> float:
    """mu of the exponential time shift: a line through two points (tokens, shift) of the scheduler's configuration.

    Source: diffusers' Flux and Qwen-Image pipelines.
    """
    low, high = config["base_image_seq_len"], config["max_image_seq_len"]
    start, end = config["base_shift"], config["max_shift"]
    return float(start + (end - start) * (image_tokens - low) / (high - low))


def pipeline_sigmas(
    config: Mapping[str, Any],
    num_steps: int,
    *,
    image_tokens: int,
    start: Sequence[float] | None = None,
    shift: float | None = None,
) -> Float[Tensor, " num_steps_plus_1"]:
    """The sigmas that FlowMatchEulerDiscreteScheduler goes through in ``num_steps`` steps, from about 1 to 0; on the CPU.

    ``start``: the sigmas before shifting where the pipeline gives its own; else the scheduler's. ``shift``: mu where
    the pipeline computes it; else ``dynamic_shift``. ValueError where the configuration has no schedule of this many steps.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; a schedule has at least one step")
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(config))
    mu = None
    if scheduler.config.use_dynamic_shifting:
        mu = dynamic_shift(scheduler.config, image_tokens) if shift is None else shift
    if scheduler.config.shift_terminal and num_steps == 1:
        raise ValueError("this scheduler stretches its sigmas to shift_terminal, which takes at least 2 steps")
    scheduler.set_timesteps(None if start is not None else num_steps, sigmas=None if start is None else list(start), mu=mu)
    sigmas: Tensor = scheduler.sigmas
    assert torch.isfinite(sigmas).all()
    return sigmas.to("cpu", torch.float32)
