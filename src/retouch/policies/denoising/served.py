"""How far the chains of an engine are from the policy's own, and the weights that correct the difference.

An engine's velocities differ from the policy's, because it has other kernels, batches and number types. The state x that a step
reached is mean + std * noise for the engine, and the policy's mean is another one. With both log-probabilities reduced by the mean
over elements, their difference is (mean(z_policy^2) - mean(z_engine^2)) / 2, where z is (x - mean) / std. Since the noise is
independent of the difference d of the two means, in standard deviations, this is d^2 / 2 on average. A log-ratio of 5e-5 thus
means velocities that are off by a hundredth of the noise, which log-ratios alone do not show.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from retouch.core.surrogates import importance_weights
from retouch.policies.denoising.trajectory import DenoisingTrajectory
from retouch.policies.engines.base import EngineFault
from retouch.types import Slice


def squared_deviations(
    policy: Float[Tensor, "b t"], engine: Float[Tensor, "b t"], *, step_std: Float[Tensor, " t"], with_variance: bool
) -> Float[Tensor, "b t"]:
    """Estimates of the mean squared distance of the engine's means from the policy's, in variances of the step.

    The arguments are log-probabilities with the mean over elements. ``step_std``: the standard deviation of each step.
    ``with_variance``: they are densities; False for "cps", whose log-probability is minus the mean squared distance to the mean.
    """
    difference = (policy - engine).abs()
    return 2 * difference if with_variance else difference / step_std.square()


def check_deviations(
    deviations: Float[Tensor, "b t"], log_probs: Float[Tensor, "b t"], *, limit: float, any_rank: Callable[[bool], bool]
) -> None:
    """EngineFault on all ranks if on one of them a log-probability is not finite, or the root of the mean deviation is above
    ``limit``. ``any_rank``: whether a flag is true on at least one rank; all ranks must make this call."""
    off = deviations.mean().sqrt().item() if log_probs.isfinite().all() else float("nan")
    if any_rank(not off <= limit):
        raise EngineFault(
            f"the engine's steps are off from the policy's by {off:.3g} standard deviations of their noise on this rank, and the "
            f"recipe allows {limit:g} (rollout.engine.max_mismatch). Its server may have other weights, text encoders, guidance or "
            "number types than the policy, or approximate the model (caches, quantised layers, sparse attention)"
        )


def mismatch_weights(trajectory: DenoisingTrajectory, part: Slice, *, truncate_at: float | None) -> Float[Tensor, "r a"] | None:
    """The importance weights of a part of chains that an engine sampled; None without truncation, where nothing is weighted."""
    assert trajectory.behaviour_log_probs is not None, "an engine sampled these chains"
    if truncate_at is None:
        return None
    policy, engine = (each[part.rows, part.actions] for each in (trajectory.log_probs, trajectory.behaviour_log_probs))
    return importance_weights(policy, engine, trajectory.mask[part.rows, part.actions], cap=truncate_at)
