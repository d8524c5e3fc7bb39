"""The probability ratio in bfloat16 before the first update; it is 1 if rollout and update compute the same log-probabilities.

The ratio depends on the shapes of the forward passes. It is measured with equal shapes, the default of recipes, and with different
shapes, which shows the effect of ``rollout.equal_shapes``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from cases import QWEN_SHORT, SD3, Built, Case, build
from findings import Finding, at_most, measured
from target import Target
from torch import Tensor

from retouch.run.preflight import CLIP_SHARE
from retouch.types import Needs


def sd3(target: Target) -> Iterator[Finding]:
    """Stable Diffusion 3.5 Medium, with guidance and without."""
    target.require_memory(40e9)
    yield from _ratios(SD3, target, guidance_scales=(1.0, 4.5))


def qwen(target: Target) -> Iterator[Finding]:
    """Four blocks of Qwen-Image-Edit at full width."""
    target.require_memory(30e9)
    yield from _ratios(QWEN_SHORT, target, guidance_scales=(4.0,))


def _ratios(case: Case, target: Target, *, guidance_scales: tuple[float, ...]) -> Iterator[Finding]:
    built = build(case, target)
    clip = built.phase.objective.clip_high
    for scale in guidance_scales:
        for equal in (True, False):
            ratios = _ratio_of(built, scale=scale, equal=equal)
            off = (ratios - 1).abs()
            name = f"guidance {scale:g}, {'equal' if equal else 'different'} shapes"
            yield at_most(f"{name}: largest |ratio - 1|", off.max().item(), CLIP_SHARE * clip if equal else None)
            yield measured(f"{name}: mean of ratio - 1", (ratios - 1).mean().item())
            yield measured(f"{name}: share beyond the clip range of {clip:g}", 100 * (off > clip).double().mean().item(), "%")


def _ratio_of(built: Built, *, scale: float, equal: bool) -> Tensor:
    """The ratios (b, t) of the transitions of one step. With different shapes, the update computes one transition at a time."""
    rollout: Any = built.recipe.resolved_phases()[0].rollout
    policy: Any = built.parts.policy(rollout.model_copy(update={"guidance_scale": scale, "equal_shapes": equal}))
    if not equal:
        policy.microbatch = 1
    trajectory = policy.rollout(built.phase.batch(0))
    ratios = torch.empty_like(trajectory.log_probs)
    with torch.no_grad():
        for part in policy.microbatches(trajectory):
            ratios[part.rows, part.actions] = policy.evaluate(trajectory, part, Needs()).log_ratio.exp()
    return ratios.double().cpu()
